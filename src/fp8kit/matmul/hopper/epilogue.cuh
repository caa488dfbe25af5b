// The epilogue: split-K reduction, scales and bias, conversion, and the store of a tile.

struct Output {
  const float* row_scale;  // of the MMA's rows: of weights with SWAP_AB, else of tokens
  const float* col_scale;
  const void* bias;  // [N] or null
  void* y;           // [M, N]
  int m, n, row_stride, col_stride;
};

// Scales and bias of a tile, loaded while the MMAs run. Asynchronous copies move at least 4 bytes, so
// a bias, which may have 16 bits, waits in registers until the tile is done.
struct ScalesAndBias {
  float row[MMA_M], col[WARPGROUPS][MMA_N], bias[WARPGROUPS][BIASES];

  __device__ void load_scales(const Output& out, int row0, int col0) {
    if (BLOCK_SCALES) return;
    const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
    const int rows = SWAP_AB ? out.n : out.m, cols = SWAP_AB ? out.m : out.n;
    for (int i = thread; i < MMA_N && !QUANTIZE_ROWS; i += 128)
      copy_async(&col[warpgroup][i], out.col_scale + (long long)min(col0 + i, cols - 1) * out.col_stride);
    if (thread < 64) {
      const int i = warpgroup * 64 + thread;
      copy_async(&row[i], out.row_scale + (long long)min(row0 + i, rows - 1) * out.row_stride);
    }
  }
  __device__ static void load_biases(const Output& out, float (&registers)[THREAD_BIASES], int n0) {
    const int thread = threadIdx.x % 128, first = n0 + (SWAP_AB ? threadIdx.x / 128 * 64 : 0);
#pragma unroll
    for (int i = 0; i < THREAD_BIASES; i++)
      if (out.bias && thread + i * 128 < BIASES)
        registers[i] = load_value<BIAS_KIND>(out.bias, min(first + thread + i * 128, out.n - 1));
  }
  // Waits for the loads; the warpgroup sees them after its next barrier.
  __device__ void finish_loads(const Output& out, const float (&registers)[THREAD_BIASES]) {
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < THREAD_BIASES; i++)
      if (out.bias && thread + i * 128 < BIASES)
        bias[threadIdx.x / 128][thread + i * 128] = registers[i];
    asm volatile("cp.async.wait_all;" ::: "memory");
  }
};

// Accumulator i of a thread: column i / 4 * 8 + q * 2 + i % 2, row i % 4 / 2 * 8 + g of its warp's 16.
__device__ __forceinline__ void apply_scales_and_bias(const Output& out, float (&acc)[ACC],
                                                      const ScalesAndBias& scales) {
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int row_g = threadIdx.x / 32 * 16 + g;
  const float* const bias = scales.bias[warpgroup];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float row_scale = BLOCK_SCALES ? 1.0f : scales.row[row_g + half * 8];
    const float row_bias = out.bias && SWAP_AB ? bias[row_g % 64 + half * 8] : 0.0f;
#pragma unroll
    for (int i = half * 2; i < ACC; i += 4)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int col = i / 4 * 8 + q * 2 + j;
        const float x_scale = SWAP_AB ? scales.col[warpgroup][col] : row_scale;
        const float w_scale = SWAP_AB ? row_scale : scales.col[warpgroup][col];
        const float added = !out.bias ? 0.0f : SWAP_AB ? row_bias : bias[col];
        // explicit roundings: every tile configuration gives the same bits
        if (BLOCK_SCALES)
          acc[i + j] = out.bias ? acc[i + j] + added : acc[i + j];
        else
          acc[i + j] = out.bias ? __fmaf_rn(__fmul_rn(acc[i + j], x_scale), w_scale, added)
                                : __fmul_rn(__fmul_rn(acc[i + j], x_scale), w_scale);
      }
  }
}

__device__ __forceinline__ int vector_offset(int line, int vector) {
  return line * LINE_BYTES + (SWIZZLED ? vector ^ line % 8 : vector) * 16;
}

// Whether the block of this rank stores a column; rank -1 stores all.
__device__ __forceinline__ bool owns(int rank, int col) {
  return SPLIT_K == 1 || rank < 0 || col / 8 / OWNED_FRAGMENTS == rank;
}

// Stores EPILOGUE_COLS columns of a warpgroup's accumulators to shared memory in the order of y, so
// transposed with SWAP_AB.
__device__ __forceinline__ void store_shared(const float (&acc)[ACC], u8* buffer, int rank, int from) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, matrix = lane / 8;
#pragma unroll
  for (int i = 0; i < EPILOGUE_COLS; i += 16) {
    const float* v = acc + (from + i) / 2;
    if (!owns(rank, from + i)) continue;
    const u32 to = shared(buffer) + (SWAP_AB ? vector_offset(i + matrix / 2 * 8 + lane % 8,
                                                             warp * 2 + matrix % 2)
                                             : vector_offset(warp * 16 + lane % 16, i / 8 + lane / 16));
    if (MMA_N == 8)
      asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to),
                   "r"(narrow<OUT_KIND>(v[0], v[1])), "r"(narrow<OUT_KIND>(v[2], v[3])) : "memory");
    else if (SWAP_AB)
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                   "r"(narrow<OUT_KIND>(v[0], v[1])), "r"(narrow<OUT_KIND>(v[2], v[3])),
                   "r"(narrow<OUT_KIND>(v[4], v[5])), "r"(narrow<OUT_KIND>(v[6], v[7])) : "memory");
    else
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                   "r"(narrow<OUT_KIND>(v[0], v[1])), "r"(narrow<OUT_KIND>(v[2], v[3])),
                   "r"(narrow<OUT_KIND>(v[4], v[5])), "r"(narrow<OUT_KIND>(v[6], v[7])) : "memory");
  }
}

// Copies a buffer to global memory in vectors of eight results of one token. The warpgroup's first
// result is that of weight row n0 and token t0.
__device__ __forceinline__ void copy_to_global(const Output& out, const u8* buffer, int rank, int from,
                                               int n0, int t0) {
  const int thread = threadIdx.x % 128;
  auto destination = [&](int i, int& valid) {  // and how many of the eight results exist
    const int line = i / LINE_VECTORS, col = i % LINE_VECTORS * 8;
    const int token = t0 + (SWAP_AB ? from : 0) + line, n = n0 + (SWAP_AB ? 0 : from) + col;
    valid = line < LINES && token < out.m && owns(rank, from + (SWAP_AB ? line : col)) ? out.n - n : 0;
    return (u16*)out.y + (long long)token * out.n + n;
  };
  auto source = [&](int i) {
    return (const u16*)(buffer + vector_offset(i / LINE_VECTORS, i % LINE_VECTORS));
  };
  constexpr int ALL = LINES * LINE_VECTORS, COPIES = (ALL + 127) / 128;
  if (out.n % 8 == 0) {
    uint4 vectors[COPIES];  // loads first, so that they do not wait for stores
#pragma unroll
    for (int copy = 0; copy < COPIES; copy++)
      if (thread + copy * 128 < ALL) vectors[copy] = *(const uint4*)source(thread + copy * 128);
#pragma unroll
    for (int copy = 0; copy < COPIES; copy++) {
      int valid;
      u16* const to = destination(thread + copy * 128, valid);
      if (valid > 0) *(uint4*)to = vectors[copy];
    }
  } else {
#pragma unroll 1
    for (int i = thread; i < ALL; i += 128) {
      int valid;
      u16* const to = destination(i, valid);
#pragma unroll
      for (int j = 0; j < 8; j++)
        if (j < valid) to[j] = source(i)[j];
    }
  }
}

// Stores the columns that this block owns. TMA clips results beyond M and N. It reads the last
// EPILOGUE_BUFFERS parts while the next tile is multiplied, so only earlier parts are waited for here.
__device__ __forceinline__ void store_tile(const Output& out, const TensorMap* y_map,
                                           const float (&acc)[ACC], u8* buffers, int block_warp,
                                           int rank, int n0, int t0) {
  const int warpgroup = block_warp / 4, warp = block_warp % 4;
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  (SWAP_AB ? n0 : t0) += warpgroup * 64;
  if (OUT_KIND == F32) {
#pragma unroll
    for (int i = 0; i < ACC; i++) {
      const int col = i / 4 * 8 + q * 2 + i % 2, row = warp * 16 + i % 4 / 2 * 8 + g;
      const int token = t0 + (SWAP_AB ? col : row), n = n0 + (SWAP_AB ? row : col);
      if (owns(rank, col) && token < out.m && n < out.n)
        ((float*)out.y)[(long long)token * out.n + n] = acc[i];
    }
    warpgroup_barrier(warpgroup);
  } else if (TMA_STORE) {
#pragma unroll
    for (int first = 0; first < EPILOGUE_PARTS; first += EPILOGUE_BUFFERS) {
      if (first > 0) {
        if (warp == 0 && elect_one()) tma_store_wait_read();
        warpgroup_barrier(warpgroup);
      }
#pragma unroll
      for (int part = first; part < EPILOGUE_PARTS && part < first + EPILOGUE_BUFFERS; part++)
        store_shared(acc, buffers + (part - first) * EPILOGUE_BYTES, rank, part * EPILOGUE_COLS);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      warpgroup_barrier(warpgroup);
      if (warp == 0 && elect_one()) {
#pragma unroll
        for (int part = first; part < EPILOGUE_PARTS && part < first + EPILOGUE_BUFFERS; part++)
          tma_store(y_map, (n0 + (SWAP_AB ? 0 : part * EPILOGUE_COLS)) * 2,
                    t0 + (SWAP_AB ? part * EPILOGUE_COLS : 0),
                    shared(buffers) + (part - first) * EPILOGUE_BYTES);
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      }
    }
  } else {
#pragma unroll
    for (int from = 0; from < MMA_N; from += EPILOGUE_COLS) {
      store_shared(acc, buffers, rank, from);
      warpgroup_barrier(warpgroup);
      copy_to_global(out, buffers, rank, from, n0, t0);
      // the next tile passes other barriers before its first store
      if (from + EPILOGUE_COLS < MMA_N) warpgroup_barrier(warpgroup);
    }
  }
}

// Split-K: sends each block of the cluster the fragments that it owns, then adds the partial sums of
// its own fragments by rank, so that bits do not depend on timing.
__device__ __forceinline__ void reduce_split_k(float (&acc)[ACC], u32 partials, u32 received, int rank) {
  const u32 own = threadIdx.x * 16;
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");  // all barriers have been initialised
#pragma unroll
  for (int owner = 0; owner < SPLIT_K; owner++) {
    if (owner == rank) continue;
    const u32 to = in_block(partials + (rank - (rank > owner)) * PARTIAL_BYTES + own, owner);
    const u32 barrier = in_block(received, owner);
#pragma unroll
    for (int f = owner * OWNED_FRAGMENTS; f < FRAGMENTS && f < (owner + 1) * OWNED_FRAGMENTS; f++)
      asm volatile(
          "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], "
          "{%1, %2, %3, %4}, [%5];" ::"r"(to + (f - owner * OWNED_FRAGMENTS) * CONSUMERS * 16),
          "f"(acc[4 * f]), "f"(acc[4 * f + 1]), "f"(acc[4 * f + 2]), "f"(acc[4 * f + 3]),
          "r"(barrier) : "memory");
  }
  if (rank * OWNED_FRAGMENTS >= FRAGMENTS) return;
  barrier_wait_cluster(received, 0);
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) {
    if (f / OWNED_FRAGMENTS != rank) continue;
    float sum[4] = {0, 0, 0, 0};
#pragma unroll
    for (int part = 0; part < SPLIT_K; part++) {
      float v[4] = {acc[4 * f], acc[4 * f + 1], acc[4 * f + 2], acc[4 * f + 3]};
      if (part != rank)
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                     : "r"(partials + (part - (part > rank)) * PARTIAL_BYTES +
                           f % OWNED_FRAGMENTS * CONSUMERS * 16 + own));
#pragma unroll
      for (int i = 0; i < 4; i++) sum[i] = part == 0 ? v[i] : sum[i] + v[i];
    }
#pragma unroll
    for (int i = 0; i < 4; i++) acc[4 * f + i] = sum[i];
  }
}
