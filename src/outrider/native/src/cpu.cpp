// Which objects this CPU can run; itself compiled for any CPU.
#if defined(__x86_64__)
#include <cpuid.h>

#include <initializer_list>
#endif
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace outrider {
namespace {

#if defined(__x86_64__)

// By cpuid itself: not every compiler's library answers __builtin_cpu_supports.
struct Features {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;

    Features(unsigned leaf, unsigned subleaf) {
        __get_cpuid_count(leaf, subleaf, &eax, &ebx, &ecx, &edx);
    }
};

bool all(unsigned word, std::initializer_list<int> bits) {
    for (int bit : bits)
        if (!(word >> bit & 1)) return false;
    return true;
}

// Whether the system saves the registers of AVX (bits 1 and 2) or AVX-512 (and 5 to 7) too.
bool saves(unsigned registers) {
    if (!all(Features(1, 0).ecx, {27})) return false;  // OSXSAVE: xgetbv may be used
    unsigned low = 0, high = 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & registers) == registers;
}

bool has_avx2() {
    return saves(0x06) && all(Features(1, 0).ecx, {12, 28, 29}) &&  // FMA, AVX, F16C
           all(Features(7, 0).ebx, {5});
}

// VNNI in registers of 256 bits, which CPUs without AVX-512 have.
bool has_avx_vnni() { return all(Features(7, 1).eax, {4}); }

bool has_avx512() {
    return saves(0xe6) && all(Features(7, 0).ebx, {16, 17, 30, 31});  // F, DQ, BW, VL
}

bool has_avx512_vnni() { return all(Features(7, 0).ecx, {11}); }

bool has_avx512_bf16() { return all(Features(7, 1).eax, {5}); }

// Whether fp32's fused products are twice as fast as the dot products of AVX-512 BF16. They are on
// Emerald Rapids, which has AMX for bf16; taken for all of Intel's CPUs with AVX-512 FP16.
bool has_slow_bf16() {
    const Features vendor(0, 0);
    const bool intel = vendor.ebx == 0x756e6547 && vendor.edx == 0x49656e69 &&
                       vendor.ecx == 0x6c65746e;  // "GenuineIntel"
    return intel && all(Features(7, 0).edx, {23});
}

// AMX's tiles are given to a process that asks the kernel for them; it asks here.
bool has_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
    constexpr int ask = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    const bool listed = all(Features(7, 0).edx, {22, 24, 25});  // BF16, TILE, INT8
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

// By bit, as ISAS of native/choice.py has them.
#if defined(__x86_64__)
enum { avx2 = 2, avxvnni = 4, avx512 = 8, avx512vnni = 16, avx512bf16 = 32, amx = 64 };
#elif defined(__aarch64__)
enum { neon = 2, dotprod = 4, bf16 = 8 };
#endif

}  // namespace

// The sets that this CPU runs, a bit each.
int cpu_sets() {
    int sets = 1;  // portable
#if defined(__x86_64__)
    if (!has_avx2()) return sets;
    sets |= avx2;
    if (has_avx_vnni()) sets |= avxvnni;
    if (!has_avx512()) return sets;
    sets |= avx512;
    if (!has_avx512_vnni()) return sets;
    sets |= avx512vnni;
    if (!has_avx512_bf16()) return sets;
    sets |= avx512bf16;
    if (has_tiles()) sets |= amx;
#elif defined(__aarch64__) && defined(__linux__)
    sets |= neon;
    if (!has_dotprod()) return sets;
    sets |= dotprod;
    if (has_i8mm_and_bf16()) sets |= bf16;
#endif
    return sets;
}

// Those of them that are slower than the set before.
int cpu_slow_sets() {
#if defined(__x86_64__)
    if (has_slow_bf16()) return cpu_sets() & avx512bf16;
#endif
    return 0;
}

}  // namespace outrider
