// codes[M, K] = e4m3(x / scale), scale[M] = max(max_k |x| / 448, min_scale), for few rows.
//
// A row belongs to a cluster of blocks, and stays in their registers from the one read to the one
// write: each warp sends its maximum to every block of the cluster, all of which then agree.
//
// Set by the host: KIND, VECTORS.

constexpr int MOST_WARPS = 16, MOST_BLOCKS = 8;

extern "C" __global__ void __launch_bounds__(32 * MOST_WARPS) cluster_rows_kernel(
    const u8* x, float* scales, u8* codes,  // x is not read-only: it may be written until the wait
    long long row_bytes, int vectors, float min_scale) {
  __shared__ u32 maxima[MOST_WARPS * MOST_BLOCKS];
  __shared__ alignas(8) u64 arrived;
  int rank, blocks;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const long long row = blockIdx.x / blocks;

  asm volatile("griddepcontrol.launch_dependents;");
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(&arrived)));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared(&arrived)),
                 "r"(blocks * warps * 4) : "memory");
  }
  __syncthreads();
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");

  uint4 held[VECTORS];
  const int first = rank * blockDim.x + threadIdx.x, step = blocks * blockDim.x;
#pragma unroll
  for (int i = 0; i < VECTORS; i++)
    held[i] = first + i * step < vectors
                  ? *(const uint4*)(x + row * row_bytes + (long long)(first + i * step) * 16)
                  : make_uint4(0, 0, 0, 0);
  u32 magnitude = __reduce_max_sync(~0u, largest(held));
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");  // all barriers have been set up
  if (lane < blocks)
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
            in_block(shared(&maxima[rank * warps + warp]), lane)),
        "r"(magnitude), "r"(in_block(shared(&arrived), lane)) : "memory");
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra again;\n}" ::"r"(shared(&arrived)) : "memory");
  for (int i = lane; i < blocks * warps; i += 32) magnitude = max(magnitude, maxima[i]);
  magnitude = __reduce_max_sync(~0u, magnitude);

  const float scale = scale_of(magnitude, min_scale), reciprocal = __frcp_rn(scale);
  if (rank == 0 && threadIdx.x == 0) scales[row] = scale;
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    const int at = first + i * step;
    if (at >= vectors) continue;
    u8* const to = codes + row * vectors * EACH + (long long)at * EACH;
    if (KIND == F32)
      *(u32*)to = encode(held[i], 0, scale, reciprocal);
    else
      *(uint2*)to = make_uint2(encode(held[i], 0, scale, reciprocal),
                               encode(held[i], 1, scale, reciprocal));
  }
}
