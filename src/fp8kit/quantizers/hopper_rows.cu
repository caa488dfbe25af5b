// codes[M, K] = e4m3(x / scale), scale[M] = max(max_k |x| / 448, min_scale), for few rows.
//
// A cluster of blocks has one row and keeps it in registers between its only read and its only
// write. Each warp sends its maximum to every block of the cluster, so all get the same scale.
//
// Set by the host: KIND, VECTORS, BLOCKS of a cluster, THREADS of a block.

constexpr int WARPS = THREADS / 32, STEP = BLOCKS * THREADS;

extern "C" __global__ void __launch_bounds__(THREADS) cluster_rows_kernel(
    const u8* x, float* scales, u8* codes,  // x is not read-only: it may be written until the wait
    long long row_bytes, long long code_bytes, int vectors, float min_scale) {
  __shared__ u32 maxima[WARPS * BLOCKS];
  __shared__ alignas(8) u64 arrived;
  const int rank = cluster_rank();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const long long row = blockIdx.x / BLOCKS;

  asm volatile("griddepcontrol.launch_dependents;");
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(&arrived)));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x == 0)
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared(&arrived)),
                 "r"(BLOCKS * WARPS * 4) : "memory");
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");

  uint4 held[VECTORS];
  const int first = rank * THREADS + threadIdx.x;
#pragma unroll
  for (int i = 0; i < VECTORS; i++)
    held[i] = first + i * STEP < vectors
                  ? *(const uint4*)(x + row * row_bytes + (long long)(first + i * STEP) * 16)
                  : make_uint4(0, 0, 0, 0);
  u32 magnitude = __reduce_max_sync(~0u, largest(held));
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");  // all barriers have been set up
  if (lane < BLOCKS)
    send(in_block(shared(&maxima[rank * WARPS + warp]), lane), magnitude, in_block(shared(&arrived), lane));
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra again;\n}" ::"r"(shared(&arrived)) : "memory");
#pragma unroll
  for (int i = lane; i < BLOCKS * WARPS; i += 32) magnitude = max(magnitude, maxima[i]);
  magnitude = __reduce_max_sync(~0u, magnitude);

  const float scale = scale_of(magnitude, min_scale), reciprocal = __frcp_rn(scale);
  if (rank == 0 && threadIdx.x == 0) scales[row] = scale;
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const int at = first + i * STEP;
    if (at >= vectors) continue;
    u8* const to = codes + row * code_bytes + (long long)at * EACH;
    if (KIND == F32)
      *(u32*)to = encode(held[i], 0, scale, reciprocal);
    else
      *(uint2*)to = make_uint2(encode(held[i], 0, scale, reciprocal),
                               encode(held[i], 1, scale, reciprocal));
  }
}
