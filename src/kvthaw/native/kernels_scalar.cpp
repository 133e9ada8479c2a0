#define KV_NAME kernels_scalar
#define KV_ISA scalar
#define KV_WIDTH 4
#define KV_GROUP 4
#include "kernels.inl"
