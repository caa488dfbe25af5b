// y[m] = sum_j weights[m, j] * rows[m * k + j], added in the order of j in fp32 and rounded once.
//
//   macro      unit        meaning
//   THREADS    threads     of a block
//   AT_ONCE    pairs       whose rows are loaded together
//   BLOCKS_PER_SM   blocks   least occupancy
//   KIND       dtype tag   of rows and result, read by encode.cuh

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) combine_rows(
    const uint4* rows, const int* row_of_pair, const float* weights, uint4* y, int top_k, int vectors) {
  const int blocks = (vectors + THREADS - 1) / THREADS;
  const long long token = blockIdx.x / blocks;
  const int at = blockIdx.x % blocks * THREADS + threadIdx.x;
  extern __shared__ __align__(8) float2 pair[];  // its weight, and whether it has a row
  // row_of_pair and weights are older than the product, so reading them needs no wait for it; see routes.cuh
  for (int j = threadIdx.x; j < top_k; j += THREADS) {
    const bool exists = __ldcg(row_of_pair + token * top_k + j) >= 0;
    pair[j] = make_float2(exists ? __ldcg(weights + token * top_k + j) : 0.0f, exists);
  }
  __syncthreads();
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  if (at >= vectors) return;
  float sum[EACH] = {};
  for (int from = 0; from < top_k; from += AT_ONCE) {
    float weight[AT_ONCE];
    bool exists[AT_ONCE];
    uint4 held[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      exists[j] = from + j < top_k && pair[from + j].y;
      weight[j] = exists[j] ? pair[from + j].x : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++)
      if (exists[j]) held[j] = rows[(token * top_k + from + j) * vectors + at];
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      const u32 words[4] = {held[j].x, held[j].y, held[j].z, held[j].w};
#pragma unroll
      for (int i = 0; i < EACH && exists[j]; i++) {
        const float value = widen(i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xffff);
        sum[i] = __fadd_rn(sum[i], __fmul_rn(value, weight[j]));
      }
    }
  }
  u32 out[4];
#pragma unroll
  for (int i = 0; i < 4; i++) out[i] = narrow(sum[2 * i], sum[2 * i + 1]);
  y[token * vectors + at] = make_uint4(out[0], out[1], out[2], out[3]);
}
