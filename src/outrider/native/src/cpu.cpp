// Which objects this CPU can run; itself compiled for any CPU.
#include <initializer_list>

namespace outrider {

// 0 portable, 1 AVX2, 2 AVX-512, 3 AVX-512 with bf16.
int cpu_level() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    for (bool has : {bool(__builtin_cpu_supports("avx512f")), bool(__builtin_cpu_supports("avx512bw")),
                     bool(__builtin_cpu_supports("avx512dq")),
                     bool(__builtin_cpu_supports("avx512vl"))})
        if (!has) return 1;
    return __builtin_cpu_supports("avx512bf16") ? 3 : 2;
#else
    return 0;
#endif
}

}  // namespace outrider
