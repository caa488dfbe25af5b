// Sorts pairs of a token and an expert into tiles, and quantizes tokens into the rows of their pairs.
//
// Few pairs are sorted by each block for itself, which then quantizes one token. Many are sorted by one
// cluster: each warp counts the experts of a stretch of pairs, prefix sums over all warps of all blocks
// give it a first row for each expert, then it walks its stretch again. The next kernel quantizes at the
// same time. It waits for the sort before it stores codes; where codes are written once per token, for a
// product that gathers the rows of its pairs, only before it stores scales of groups. Both sorts are stable.
//
//   macro           unit         meaning
//   THREADS         threads      of a block
//   SORTS           0, 1, 2      pairs are sorted already, are few, or are many
//   CLUSTER         blocks       that sort many pairs together
//   QUANTIZES       0 or 1       quantize a token per block
//   GATHERED        0 or 1       write the codes of a token once, not to the rows of its pairs
//   VECTORS         vectors      of 16 bytes of a token that a thread holds
//   SCALES          0, 1, 2      per row, per 1x128 group, or given
//   TILE_TOKENS     tokens       of a tile of the products
//   FEW_PAIRS       pairs        that are few
//   KIND            dtype tag    of tokens, read by encode.cuh

__device__ __forceinline__ void cluster_barrier() {
  if (CLUSTER > 1)
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
  else
    __syncthreads();
}

// Sorts all pairs. store(pair, row) is called for each, with row -1 if it has no expert.
template <typename Store>
__device__ __forceinline__ void sort_many(const Routes& routes, u32* counts, TokenTile* tiles,
                                          int* tile_count, Store store) {
  constexpr int WARPS = THREADS / 32, LOADS = 4;
  __shared__ int sums[WARPS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, experts = routes.experts;
  const int all_warps = WARPS * CLUSTER, rank = CLUSTER > 1 ? blockIdx.x : 0;
  const int stretch = (routes.pairs + all_warps * 32 - 1) / (all_warps * 32) * 32;
  const int begin = (rank * WARPS + warp) * stretch, end = min(begin + stretch, routes.pairs);
  u32* const own = counts + warp * experts;
  u32* const of_block = counts + WARPS * experts;        // rows of each expert
  int* const others_before = (int*)of_block + experts;  // tiles of earlier experts that have more than one
  for (int i = threadIdx.x; i < WARPS * experts; i += THREADS) counts[i] = 0;
  __syncthreads();
  int loaded[LOADS];  // several loads in flight: a warp has no other work to hide their latency
  auto load = [&](int from) {
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const int pair = from + i * 32 + lane;
      loaded[i] = pair < end ? routes.expert(pair) : -1;
    }
  };
  for (int from = begin; from < end; from += 32 * LOADS) {
    load(from);
#pragma unroll
    for (int i = 0; i < LOADS; i++)
      if (loaded[i] >= 0) atomicAdd(own + loaded[i], 1u);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += THREADS) {
    int rows = 0;
#pragma unroll 8
    for (int w = 0; w < WARPS; w++) rows += counts[w * experts + e];
    of_block[e] = rows;
  }
  cluster_barrier();
  // the rows of an expert in all blocks, and in those before this one
  auto rows_of = [&](int e, int& before) {
    int rows = 0;
    before = 0;
#pragma unroll
    for (int block = 0; block < CLUSTER; block++) {
      u32 taken;
      asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(taken) : "r"(in_block(shared(of_block + e), block)));
      if (block < rank) before += taken;
      rows += taken;
    }
    return rows;
  };
  // Experts of one tile mostly wait for memory, others for MMAs. The former are spread evenly over the tiles
  // of the latter, so that both are under way at any time. A thread places one expert.
  constexpr int SINGLE = 1 << 20;
  const int expert = threadIdx.x;
  int before = 0;
  const int rows = expert < experts ? rows_of(expert, before) : 0, tiled = (rows + TILE_TOKENS - 1) / TILE_TOKENS;
  const int own_tiles = tiled == 1 ? SINGLE : tiled, through = inclusive_sum(own_tiles);
  if (lane == 31) sums[warp] = through;
  __syncthreads();
  const int earlier = through - own_tiles + __reduce_add_sync(~0u, lane < warp ? sums[lane] : 0);
  const int all = __reduce_add_sync(~0u, lane < WARPS ? sums[lane] : 0);
  const int singles = all / SINGLE, others = all % SINGLE;
  if (expert < experts) others_before[expert] = earlier % SINGLE;
  __syncthreads();
  int tile;
  if (tiled == 1) {
    tile = earlier / SINGLE;
    int low = 0;  // the first expert of more tiles that comes after this one
    for (int high = experts; low < high;) {
      const int middle = (low + high) / 2;
      if (singles * others_before[middle] < (tile + 1) * others)
        low = middle + 1;
      else
        high = middle;
    }
    tile += low < experts ? others_before[low] : others;
  } else {
    tile = earlier % SINGLE + singles * (earlier % SINGLE) / max(others, 1);
  }
  if (expert < experts) {
    int row = tile * TILE_TOKENS + before;
#pragma unroll 8
    for (int w = 0; w < WARPS; w++) {
      const int taken = counts[w * experts + expert];
      counts[w * experts + expert] = row;
      row += taken;
    }
    for (int i = rank; i < tiled; i += CLUSTER) tiles[tile + i] = {expert, rows, i << 16 | tiled, 0};
  }
  if (rank == 0 && threadIdx.x == 0) {
    tile_count[0] = singles + others;
    tile_count[1] = tile_count[2] = 0;  // tiles that the products have taken
  }
  cluster_barrier();  // no block leaves while another reads its counts
  for (int from = begin; from < end; from += 32 * LOADS) {
    if (stretch > 32 * LOADS) load(from);  // else they are still in registers
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      if (from + i * 32 < end) {
        const u32 same = __match_any_sync(~0u, loaded[i]), before = same & ((1u << lane) - 1);
        int row = -1;
        if (loaded[i] >= 0) row = own[loaded[i]] + __popc(before);
        __syncwarp();
        if (loaded[i] >= 0 && before == 0) own[loaded[i]] += __popc(same);
        __syncwarp();
        if (from + i * 32 + lane < end) store(from + i * 32 + lane, row);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) sort_and_quantize(
    const void* ids, int id_bytes, int pairs, int top_k, int experts, int* row_of_pair, int* pair_of_row,
    TokenTile* tiles, int* tile_count, const u8* x, long long x_row_bytes, int vectors, u8* codes,
    float* scales, int scale_pitch, const float* given_scale, float min_scale) {
  extern __shared__ __align__(16) int own_rows[];  // of the block's token; or counts of experts
  __shared__ u32 maxima[THREADS / 32];
  const int token = blockIdx.x;
  [[maybe_unused]] const Routes routes = {ids, id_bytes, pairs, experts};
  // without SORTS this runs beside the sort, which has waited for all earlier kernels
  if (SORTS) asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  HeldToken<THREADS> held;
  if (QUANTIZES) held.load((const uint4*)(x + token * x_row_bytes), vectors);
#if SORTS == 2
  sort_many(routes, (u32*)own_rows, tiles, tile_count, [&](int pair, int row) {
    row_of_pair[pair] = row;
    if (row >= 0) pair_of_row[row] = pair;
  });
#elif SORTS == 1
  __shared__ FewPairs few;
  few.sort(routes, THREADS, 0, [&](int pair, int row) {
    if (pair / top_k != token) return;
    own_rows[pair % top_k] = row;
    row_of_pair[pair] = row;
    if (row >= 0) pair_of_row[row] = pair;
  });
  if (token == 0) {
    for (int i = threadIdx.x; i < few.count; i += THREADS) *(int4*)(tiles + i) = *(int4*)(few.tiles + i);
    if (threadIdx.x == 0) {
      tile_count[0] = few.count;
      tile_count[1] = tile_count[2] = 0;
    }
  }
#endif
  if (!QUANTIZES) return;
  const long long row_bytes = (long long)vectors * EACH;
  auto load_rows = [&] {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    for (int i = threadIdx.x; i < top_k; i += THREADS) own_rows[i] = __ldcg(row_of_pair + token * top_k + i);
    __syncthreads();
  };
  held.put_maximum(maxima);
  __syncthreads();  // own_rows, maxima
  if (!SORTS && !GATHERED) load_rows();
  float of_group[VECTORS];
  const auto store = [&](int i, int at, uint2 bytes, float of_vector) {
    of_group[i] = of_vector;
    if (GATHERED) *(uint2*)(codes + token * row_bytes + at * EACH) = bytes;
    for (int j = 0; j < top_k && !GATHERED; j++)
      if (own_rows[j] >= 0) *(uint2*)(codes + own_rows[j] * row_bytes + at * EACH) = bytes;
  };
  const float scale = held.quantize(maxima, given_scale, min_scale, vectors, store);
  if (GATHERED && SCALES != 1) {
    // The product finds the scale by the token of a pair, so one block waits for the sort, for the kernels
    // that wait for this one. The others make room for the product.
    if (SCALES == 0 && threadIdx.x == 0) scales[token] = scale;
    if (token == 0) asm volatile("griddepcontrol.wait;" ::: "memory");
    return;
  }
  if (GATHERED) load_rows();
  if (SCALES == 0)
    for (int i = threadIdx.x; i < top_k; i += THREADS)
      if (own_rows[i] >= 0) scales[own_rows[i]] = scale;
  if (SCALES == 1)
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      const int at = threadIdx.x + i * THREADS;
      for (int j = 0; j < top_k && at < vectors && at % 16 == 0; j++)
        if (own_rows[j] >= 0) scales[(long long)(at / 16) * scale_pitch + own_rows[j]] = of_group[i];
    }
}
