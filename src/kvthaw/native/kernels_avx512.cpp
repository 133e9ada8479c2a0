#define KV_NAME kernels_avx512
#define KV_ISA avx512
#define KV_WIDTH 16
#define KV_GROUP 12
#include "kernels.inl"
