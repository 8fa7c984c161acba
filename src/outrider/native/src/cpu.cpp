// Which objects this CPU can run; itself compiled for any CPU.
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace outrider {
namespace {

#if defined(__x86_64__)

bool has_half() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}

// VNNI in registers of 256 bits, which CPUs without AVX-512 have.
bool has_avx_vnni() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}

bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

// AMX's tiles are given to a process that asks the kernel for them; it asks here.
bool has_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
    constexpr int ask = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const bool listed = (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1);  // BF16, TILE, INT8
    return listed && syscall(SYS_arch_prctl, ask, tile_data) == 0;
#else
    return false;
#endif
}

#elif defined(__aarch64__) && defined(__linux__)

// By number, since the headers of old kernels lack the names of some.
bool has_dotprod() { return getauxval(AT_HWCAP) >> 20 & 1; }  // HWCAP_ASIMDDP

bool has_i8mm_and_bf16() {
    const unsigned long all = getauxval(AT_HWCAP2);
    return (all >> 13 & 1) && (all >> 14 & 1);  // HWCAP2_I8MM, HWCAP2_BF16
}

#endif

}  // namespace

// The sets that this CPU runs, a bit each: ISAS of native/choice.py, the first in the lowest bit.
int cpu_sets() {
    int sets = 1;  // portable
#if defined(__x86_64__)
    enum { avx2 = 2, avxvnni = 4, avx512 = 8, avx512vnni = 16, avx512bf16 = 32, amx = 64 };
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_half())
        return sets;
    sets |= avx2;
    if (has_avx_vnni()) sets |= avxvnni;
    if (!has_avx512()) return sets;
    sets |= avx512;
    if (!__builtin_cpu_supports("avx512vnni")) return sets;
    sets |= avx512vnni;
    if (!__builtin_cpu_supports("avx512bf16")) return sets;
    sets |= avx512bf16;
    if (has_tiles()) sets |= amx;
#elif defined(__aarch64__) && defined(__linux__)
    enum { neon = 2, dotprod = 4, bf16 = 8 };
    sets |= neon;
    if (!has_dotprod()) return sets;
    sets |= dotprod;
    if (has_i8mm_and_bf16()) sets |= bf16;
#endif
    return sets;
}

}  // namespace outrider
