#define KV_NAME kernels_neon
#define KV_ISA neon
#define KV_WIDTH 4
#define KV_GROUP 12
#define KV_NEON
#include "kernels.inl"
