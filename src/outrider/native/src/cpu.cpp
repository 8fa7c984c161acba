// Which objects this CPU can run; itself compiled for any CPU.
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
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

#endif

}  // namespace

// 0 portable, 1 AVX2 with F16C, 2 AVX-512, 3 VNNI beside it, 4 bf16 beside both, 5 AMX.
int cpu_level() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_half()) return 0;
    if (!has_avx512()) return 1;
    if (!__builtin_cpu_supports("avx512vnni")) return 2;
    if (!__builtin_cpu_supports("avx512bf16")) return 3;
    return has_tiles() ? 5 : 4;
#else
    return 0;
#endif
}

}  // namespace outrider
