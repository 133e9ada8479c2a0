#include "kernels.h"

#include <initializer_list>

namespace kvthaw {

namespace kernels_scalar {
const Kernels* table();
}
#if defined(KV_X86)
namespace kernels_avx2 {
const Kernels* table();
}
namespace kernels_avx512 {
const Kernels* table();
}
#elif defined(KV_ARM64)
namespace kernels_neon {
const Kernels* table();
}
#endif

const Kernels* find_kernels(Isa isa) {
    if (isa == Isa::scalar) return kernels_scalar::table();
#if defined(KV_X86)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");  // each machine with both has F16C
    if (isa == Isa::avx2 && avx2) return kernels_avx2::table();
    if (isa == Isa::avx512 && avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
        return kernels_avx512::table();
#elif defined(KV_ARM64)
    if (isa == Isa::neon) return kernels_neon::table();  // each machine of 64 bits has it
#endif
    return nullptr;
}

const Kernels* best_kernels() {
    for (Isa isa : {Isa::avx512, Isa::avx2, Isa::neon})
        if (const Kernels* found = find_kernels(isa)) return found;
    return find_kernels(Isa::scalar);
}

}  // namespace kvthaw
