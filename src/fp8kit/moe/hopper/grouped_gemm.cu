// Products of rows by the weights of their experts on Hopper: warp-specialized and persistent.
//
// First product: rows of x by gates and ups, activated and quantized in groups of 1x128.
// Second product: rows of that result by the down weights, stored to the rows of their pairs.
//
// A tile has tokens of one expert. Its rows past the expert's last one are multiplied, as no token depends
// on another, and not stored. A stage holds 128 along K of two halves of weight rows, loaded from the
// checkpoint's own layout, and of the tokens. Few tokens are the MMA's columns, so that they waste no MMA;
// many are its rows, where a warp has whole groups and a thread needs two scales per step.
//
// Pipeline: one producer warp loads weights and one loads tokens, by TMA into one ring; with GATHERS warps
// copy each row of tokens by cp.async. A kernel starts before the previous one has ended (PDL), and the first
// product then sorts few pairs into its tiles. Nothing is loaded into the ring before the wait for the
// previous kernel: where several processes shared a GPU, TMA loads in flight at a change of process raised
// an illegal instruction (docs/research/performance-log.md, "Weights wait too").
//
// Where one kernel runs both products, the ring continues from one to the other: down weights are loaded
// while the last rows of the first product are multiplied. A warpgroup counts itself in at each tile whose
// rows it has stored, and the warps that load these rows wait for the count. What they wait for is stored by
// blocks that run: all are resident, by a cooperative launch, or have taken their tiles from the counter
// earlier.
//
// Main loop: as in the dense GEMM, each K step of 128 starts from zero and is promoted to fp32 registers.
// With SWAP_AB one half is promoted while the other is multiplied; with at most 32 tokens, the MMAs of two
// steps are in flight. Without, or with 144 tokens, there are registers for only one partial sum, and one
// warpgroup promotes while the other multiplies.
//
// Schedule: see scheduler.cuh. Blocks take tiles of many tokens from a counter, those of the second product
// behind those of the first. Sums along K are never split, so the bits of a row depend on nothing else.
//
// Parts, in the order of compilation: quantizers/encode.cuh, config.cuh, matmul/hopper/barriers.cuh,
// matmul/hopper/ptx.cuh, matmul/hopper/pipeline.cuh, routes.cuh, tiles.cuh, scheduler.cuh,
// activation.cuh, epilogue.cuh, columns_epilogue.cuh or rows_epilogue.cuh, grouped_gemm.cu.
//
//   macro             unit        meaning
//   FIRST, SECOND     0 or 1      the products that the kernel computes
//   SWAP_AB           0 or 1      the MMA's columns are tokens, else a half of the weights
//   MMA_N             columns     of the MMA
//   WARPGROUPS        warpgroups  consumers; each has 64 of the MMA's rows
//   STAGES            stages      of the ring
//   SMEM_BYTES        bytes       of dynamic shared memory
//   EPILOGUE_TOKENS   tokens      whose codes a warpgroup moves to global memory at once, with SWAP_AB
//   BLOCKS_PER_SM     blocks      occupancy
//   CLUSTER           blocks      of a cluster; in the first product they share the 128 features of a group
//   BAND              tiles       of tokens that all weights of an expert pass together
//   PIPELINED_STEPS   K steps     whose promotions overlap the next MMA
//   NARROW            0 or 1      tiles of the second product have one half of weight rows
//   LISTS             0 or 1      sort few pairs here, while the tokens are quantized
//   FEW_PAIRS         pairs       that are few
//   GATHERS           0 or 1      the first product gathers the rows of pairs from tokens
//   GIVEN_SCALE       0 or 1      the result of the first product has a static scale
//   GELU, LIMITED     0 or 1      the activation
//   X_GROUPS          0 or 1      rows of the first product have a scale per 128 of K, else one
//   H_GROUPS          0 or 1      rows of the second product, likewise
//   WEIGHT_BLOCKS     0 or 1      weights have a scale per 128x128 block, else per row or tensor
//   BIAS_KIND_13, BIAS_KIND_2   dtype tag   of the biases of the products
//   KIND              dtype tag   of the second product's result
//   WGMMA, WGMMA_ADD, WGMMA_REGISTERS   the MMA, see source.py

template <typename Product>
__device__ __forceinline__ void prefetch_maps(const Operands<Product>& of, bool weights) {
  tma_prefetch(weights ? of.first_map : of.token_map);
  if (weights || Product::TOKEN_GROUPS) tma_prefetch(weights ? of.second_map : of.token_scale_map);
}

struct Ring {
  Barriers full, empty;
  u32 w, x, scales;
};

constexpr u64 EVICT_NORMAL = 0x1000000000000000ull, EVICT_LAST = 0x14F0000000000000ull;  // L2 policies
// With 48 to 80 tokens in a tile the rows of pairs still fit the L2 until they are added, if weights do not stay.
constexpr u64 OF_WEIGHTS = TILE_TOKENS > 32 && TILE_TOKENS < 128 ? EVICT_NORMAL : EVICT_LAST;

// `earlier` tiles of the queue are those of the product before. Returns the first tile that is not loaded.
template <typename Product>
__device__ __forceinline__ int load_weights(const Operands<Product>& of, TileWalk tile, const Ring& ring,
                                            int feature_of_block, const TileQueue& queue,
                                            int earlier, Stage<TileQueue::SLOTS>& slot, Stage<STAGES>& next) {
  const int steps = of.steps();
  auto advance = [&](int taken) {
    if (TAKES_TURNS) return tile.next();
    tile.go_to(__shfl_sync(~0u, taken, 0));
    if (threadIdx.x % 32 == 0) queue.tell(slot, tile.packed());
    slot.advance();
  };
  int taken = 0;
  for (; tile.more(); advance(taken)) {
    if (!TAKES_TURNS && threadIdx.x % 32 == 0) taken = queue.take() - earlier;
    const int row = tile.expert * of.map_rows + tile.w * Product::TILE_FEATURES + feature_of_block;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      barrier_wait(ring.empty[next.index], next.parity ^ 1);
      if (elect_one()) {
        const u32 ready = ring.full[next.index], at = ring.w + next.index * W_BYTES;
        constexpr bool SCALES = Product::GATHERED && Product::TOKEN_GROUPS;  // of tokens, whose rows are copied
        constexpr int CHUNKS = Operands<Product>::CHUNKS;
        barrier_expect(ready, W_BYTES + (SCALES ? TILE_TOKENS * 4 : 0));
        if (SCALES)
          tma_load(ring.scales + next.index * SCALE_STAGE_BYTES, of.token_scale_map, tile.row, step, ready, EVICT_LAST);
        const int col = step * CHUNKS * TILE_K;
        tma_load(at, of.first_map, col, row, ready, OF_WEIGHTS);
        if (CHUNKS == 1)
          tma_load(at + HALF_BYTES, of.second_map, col, row + of.second_map_row, ready, OF_WEIGHTS);
        else
          tma_load(at + HALF_BYTES, of.first_map, col + TILE_K, row, ready, OF_WEIGHTS);
      }
      next.advance();
    }
  }
  return tile.at;
}

// A warp that loads tokens brings every TOKEN_WARPS-th stage, beginning with the `step`-th of the next tile.
// stored_parts: in how many parts warpgroups store a tile's rows; 0 if an earlier kernel has stored them.
template <typename Product>
__device__ __forceinline__ void load_tokens(const Operands<Product>& of, TileWalk tile, const Ring& ring,
                                            const TokenTile* listed, int stored_parts, const TileQueue& queue,
                                            Stage<TileQueue::SLOTS>& slot, Stage<STAGES>& next, int& step) {
  const int steps = of.steps();
  for (; tile.more(); TAKES_TURNS ? tile.next() : tile.go_to(queue.hear(slot)), step -= steps) {
    if (stored_parts) await_rows(listed + tile.row / TILE_TOKENS, stored_parts);
#pragma unroll 1
    for (; step < steps; step += TOKEN_WARPS) {
      barrier_wait(ring.empty[next.index], next.parity ^ 1);
      if (elect_one()) {
        constexpr int CHUNKS = Operands<Product>::CHUNKS;
        const u32 ready = ring.full[next.index], x = ring.x + next.index * X_STAGE_BYTES;
        barrier_expect(ready, CHUNKS * (X_BYTES + (Product::TOKEN_GROUPS ? TILE_TOKENS * 4 : 0)));
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
          const int chunk = step * CHUNKS + i;
          tma_load(x + i * X_BYTES, of.token_map, chunk * TILE_K, tile.row, ready, EVICT_LAST);
          if (Product::TOKEN_GROUPS)
            tma_load(ring.scales + next.index * SCALE_STAGE_BYTES + i * SCALE_BYTES, of.token_scale_map,
                     tile.row, chunk, ready, EVICT_LAST);
        }
      }
#pragma unroll
      for (int i = 0; i < TOKEN_WARPS; i++) next.advance();
    }
  }
}

// Copies the rows of pairs from tokens that are stored once, in the MMA's swizzle, a lane 16 bytes of every
// fourth row. TMA would take 18 cycles for a row.
template <typename Product>
__device__ __forceinline__ void gather_tokens(const Operands<Product>& of, TileWalk tile, const Ring& ring,
                                              const uint4* tokens, const int* pair_of_row, int top_k, u32* begins,
                                              const TileQueue& queue, Stage<TileQueue::SLOTS>& slot,
                                              Stage<STAGES>& next, int& step) {
  const int lane = threadIdx.x % 32, row = lane / 8, vector = lane % 8;
  const u32 place = ring.x + row * TILE_K + (vector ^ row) * 16;  // four rows further, bit 6 differs
  constexpr int TOGETHER = TILE_TOKENS % 16 == 0 ? 4 : 2;  // rows of a lane whose places are loaded together
  const int steps = of.steps(), vectors = of.k / 16;
  for (; tile.more(); TAKES_TURNS ? tile.next() : tile.go_to(queue.hear(slot)), step -= steps) {
    __syncwarp();  // the last tile's rows have been copied
    for (int i = lane; i < TILE_TOKENS; i += 32)
      begins[i] = (u32)__ldcg(pair_of_row + min(tile.row + i, tile.end - 1)) / top_k * vectors;
    __syncwarp();
#pragma unroll 1
    for (; step < steps; step += TOKEN_WARPS) {
      barrier_wait(ring.empty[next.index], next.parity ^ 1);
      const int col = step * (TILE_K / 16) + vector, bytes = col < vectors ? 16 : 0;  // beyond K zeros
      const uint4* const from = tokens + (bytes ? col : 0);
      const u32 to[2] = {place + next.index * X_STAGE_BYTES, (place ^ 64) + next.index * X_STAGE_BYTES};
#pragma unroll
      for (int together = 0; together < TILE_TOKENS / 4; together += TOGETHER) {
        u32 begin[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) begin[i] = begins[row + (together + i) * 4];
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to[i % 2] + (together + i) * 4 * TILE_K),
                       "l"(from + begin[i]), "r"(bytes) : "memory");
      }
      asm volatile("cp.async.wait_all;\nfence.proxy.async.shared::cta;" ::: "memory");
      __syncwarp();
      if (lane == 0) barrier_arrive(ring.full[next.index]);
#pragma unroll
      for (int i = 0; i < TOKEN_WARPS; i++) next.advance();
    }
  }
}

// Multiplies tiles, and calls stored(tile) after each. `now` is the stage to multiply, `done` the one to promote.
// Returns the next slot of the queue: by reference, it would cost tiles of 144 tokens one register too many.
template <typename Product, typename Done>
__device__ __forceinline__ Stage<TileQueue::SLOTS> multiply_tiles(
    const Operands<Product>& of, TileWalk tile, const Ring& ring, int warpgroup, int feature_of_block,
    Epilogue<Product>& epilogue, const TileQueue& queue, Stage<TileQueue::SLOTS> slot, Stage<STAGES>& now,
    Stage<STAGES>& done, Done stored) {
  constexpr int CHUNKS = Operands<Product>::CHUNKS;
  const int lane = threadIdx.x % 32, steps = of.steps(), scale_steps = of.scale_steps();
  const u32 w_tiles_at = descriptor_low(ring.w) + (SWAP_AB ? warpgroup * (64 * TILE_K / 16) : 0);
  const u32 x_tiles_at = descriptor_low(ring.x) + (SWAP_AB ? 0 : warpgroup * (64 * TILE_K / 16));
  float acc[2][ACC], partial[PARTIALS][ACC];
  // skews warpgroups that do not wait for each other, so that one runs MMAs while another runs its epilogue
  if (!(SWAP_AB && Product::ACTIVATED) && warpgroup > 0 && steps > STAGES / 2 && tile.more()) {
    Stage<STAGES> later = now;
#pragma unroll
    for (int i = 0; i < STAGES / 2; i++) later.advance();
    barrier_wait(ring.full[later.index], later.parity);
  }
  for (; tile.more(); TAKES_TURNS ? tile.next() : tile.go_to(queue.hear(slot))) {
    // feature of the warpgroup's first row or column, in the first half
    const int feature = tile.w * Product::TILE_FEATURES + feature_of_block + (SWAP_AB ? warpgroup * 64 : 0);
#if !SWAP_AB
    if (tile.row + warpgroup * 64 >= tile.end) {  // the warpgroup has no tokens
      for (int step = 0; step < steps; step++) {
        barrier_wait(ring.full[now.index], now.parity);
        if (lane == 0) barrier_arrive(ring.empty[now.index]);
        now.advance();
        done.advance();
      }
      stored(tile);
      continue;
    }
#endif
    epilogue.load(tile, of, feature);
    const float* w_scales[2];
    float w_s[2] = {1.0f, 1.0f}, w_next[2] = {1.0f, 1.0f};
    if (WEIGHT_BLOCKS) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = of.features.template row<Product>(feature, CHUNKS == 2 ? 0 : half);
        w_scales[half] = of.factors.weight + (long long)tile.expert * of.factors.expert_stride +
                         (long long)(row / 128) * scale_steps;
        w_next[half] = w_scales[half][CHUNKS == 2 ? min(half, scale_steps - 1) : 0];
      }
    }
    auto w_scale_at = [&](int step, int half) {
      const int chunk = step * CHUNKS + (CHUNKS == 2 ? half : 0);
      return w_scales[half][min(chunk, scale_steps - 1)];
    };
    auto multiply = [&](float (&sum)[ACC], int half) {
      const u32 w = w_tiles_at + now.index * (W_BYTES / 16) + half * (HALF_BYTES / 16);
      const u32 x = x_tiles_at + now.index * (X_STAGE_BYTES / 16) + (CHUNKS == 2 ? half * (X_BYTES / 16) : 0);
      const u32 a = SWAP_AB ? w : x, b = SWAP_AB ? x : w;
      wgmma_fence_registers(sum);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int j = 0; j < TILE_K / 32; j++) wgmma(sum, descriptor(a + j * 2), descriptor(b + j * 2), j > 0);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    };
    auto promote = [&](float (&sum)[ACC], int half, float w) {
      wgmma_fence_registers(sum);
      u32 read = 0;
      float(&into)[ACC] = acc[CHUNKS == 2 ? 0 : half];
      if (Product::TOKEN_GROUPS) {
        const u32 scales = ring.scales + done.index * SCALE_STAGE_BYTES;
        read = add_scaled(into, sum, scales + (CHUNKS == 2 ? half * SCALE_BYTES : 0), w);
      } else {
#pragma unroll
        for (int i = 0; i < ACC; i++) into[i] += sum[i];
      }
      if (half == 0) return;
      __syncwarp();
      if (lane == 0) barrier_arrive_after(ring.empty[done.index], read);
      done.advance();
    };
#pragma unroll
    for (int i = 0; i < ACC; i++) acc[0][i] = acc[1][i] = 0;
    if constexpr (PARTIALS == 4) {
#pragma unroll 1
      for (int step = 0; step < steps; step += 2) {
        float w_of[4] = {1.0f, 1.0f, 1.0f, 1.0f};  // by partial sum
#pragma unroll
        for (int i = 0; i < 2; i++) {
          barrier_wait(ring.full[now.index], now.parity);
#pragma unroll
          for (int half = 0; half < 2; half++) {
            multiply(partial[2 * i + half], half);
            if (!WEIGHT_BLOCKS) continue;
            w_of[2 * i + half] = w_next[half];
            w_next[half] = w_scale_at(step + i + 1, half);
          }
          now.advance();
        }
        wgmma_wait<3>();
        promote(partial[0], 0, w_of[0]);
        wgmma_wait<2>();
        promote(partial[1], 1, w_of[1]);
        wgmma_wait<1>();
        promote(partial[2], 0, w_of[2]);
        wgmma_wait<0>();
        promote(partial[3], 1, w_of[3]);
      }
    } else {
#pragma unroll 1
      for (int step = 0; step < steps; step += PIPELINED_STEPS) {
#pragma unroll
        for (int i = 0; i < PIPELINED_STEPS; i++) {
          const float w_before = w_s[1];
          if (WEIGHT_BLOCKS) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
              w_s[half] = w_next[half];
              w_next[half] = w_scale_at(step + i + 1, half);
            }
          }
          barrier_wait(ring.full[now.index], now.parity);
          multiply(partial[0], 0);
          if (PARTIALS == 1) {
            wgmma_wait<0>();
          } else {
            if (i > 0) {
              wgmma_wait<1>();
              promote(partial[LAST], 1, w_before);
            }
            multiply(partial[LAST], 1);
            wgmma_wait<1>();
          }
          promote(partial[0], 0, w_s[0]);
          if (PARTIALS == 1) {
            multiply(partial[0], 1);
            wgmma_wait<0>();
            promote(partial[0], 1, w_s[1]);
          }
          now.advance();
        }
        if (PARTIALS == 2) {
          wgmma_wait<0>();
          promote(partial[LAST], 1, w_s[1]);
        }
      }
    }
    epilogue.store(acc, tile, of, feature);
    stored(tile);
  }
  return slot;
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + PRODUCER_THREADS, BLOCKS_PER_SM) grouped_gemm(
#if FIRST
    const __grid_constant__ TensorMap gate_map, const __grid_constant__ TensorMap up_map,
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap x_scale_map,
    int w13_map_rows, int up_map_row, int hidden, int w13_tiles, const float* x_scale, int x_stride,
    const float* w13_scale, int w13_expert_stride, int w13_row_stride, const void* bias13, int intermediate,
    int gate_step, int up_row, int w13_rows, void* h, float* h_scale, int h_pitch, float limit, float alpha,
    float up_offset, float min_scale, const uint4* tokens, const int* gathered_pairs, int top_k,
#endif
#if SECOND
    const __grid_constant__ TensorMap low_map, const __grid_constant__ TensorMap high_map,
    const __grid_constant__ TensorMap h_map, const __grid_constant__ TensorMap h_scale_map,
    int w2_map_rows, int high_map_row, int w2_k, int w2_tiles, const float* h_token_scale, int h_stride,
    const float* w2_scale, int w2_expert_stride, int w2_row_stride, const void* bias2, int features,
    int w2_step, int w2_second, int w2_rows, void* products, const int* pair_of_row,
#endif
    TokenTile* tiles, int* tile_count, const void* ids, int id_bytes, int pairs, int experts) {
  extern __shared__ __align__(1024) u8 smem[];  // aligned to the pattern of the swizzle
  __shared__ alignas(8) u64 barriers[2 * STAGES + 2 * TileQueue::SLOTS];
  __shared__ int4 taken_tiles[TileQueue::SLOTS];
  __shared__ alignas(8) u64 maxima_received;
  __shared__ SharedFacts facts;
  const Barriers full(barriers);
  const u32 w_ring = shared(smem), x_ring = w_ring + STAGES * W_BYTES;
  const Barriers told = full.after(2 * STAGES);
  const TileQueue queue = {told, told.after(TileQueue::SLOTS), shared(taken_tiles), (u32*)tile_count + (FIRST ? 1 : 2)};
  const Ring ring = {full, full.after(STAGES), w_ring, x_ring, x_ring + STAGES * X_STAGE_BYTES};
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // uniform
  const bool producer = warp >= 4 * WARPGROUPS, loads_weights = warp == 4 * WARPGROUPS;
  [[maybe_unused]] const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(ring.full[s], 2);  // warps that load
      barrier_init(ring.empty[s], 4 * WARPGROUPS);
    }
    barrier_init(shared(&maxima_received), 1);
    for (int s = 0; s < TileQueue::SLOTS; s++) {
      barrier_init(queue.told[s], 1);
      barrier_init(queue.read[s], TileQueue::READERS);
    }
    barrier_init_fence();
  }
#if FIRST
  const Operands<FirstProduct> up = {
      &gate_map, &up_map, &x_map, &x_scale_map, w13_map_rows, up_map_row, hidden, w13_tiles,
      {x_scale, x_stride, w13_scale, w13_expert_stride, w13_row_stride, bias13},
      {intermediate, gate_step, up_row, w13_rows},
      {limit, alpha, up_offset},
      {h, h_scale, h_pitch, min_scale},
      gathered_pairs, top_k};
  if (producer && elect_one()) prefetch_maps(up, loads_weights);
#endif
#if SECOND
  const Operands<SecondProduct> down = {
      &low_map, &high_map, &h_map, &h_scale_map, w2_map_rows, high_map_row, w2_k, w2_tiles,
      {h_token_scale, h_stride, w2_scale, w2_expert_stride, w2_row_stride, bias2},
      {features, w2_step, w2_second, w2_rows},
      {},
      {products, nullptr, 0, 0.0f},
      pair_of_row, 1};
  if (producer && elect_one()) prefetch_maps(down, loads_weights);
#endif
#if LISTS
  __shared__ FewPairs few;
  few.sort({ids, id_bytes, pairs, experts}, CONSUMERS + PRODUCER_THREADS, 4 * WARPGROUPS, [](int, int) {});
#else
  __syncthreads();
#endif
  if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
  if (MOVE_REGISTERS && producer) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
  if (producer && warp > 4 * WARPGROUPS + TOKEN_WARPS) return;
  asm volatile("griddepcontrol.wait;" ::: "memory");
#if LISTS
  const TokenTile* const listed = few.tiles;
  const int count = few.count;
#else
  const TokenTile* const listed = tiles;
  const int count = __ldcg(tile_count);
#endif
#if FIRST
  const int clusters = gridDim.x / CLUSTER, cluster = blockIdx.x / CLUSTER;
  const TileWalk up_tiles(listed, count, w13_tiles, BAND, cluster, clusters);
#endif
#if FIRST && SECOND
  const int row_parts = w13_tiles * CLUSTER * WARPGROUPS;
  auto down_tiles = [&] {
    if (!TAKES_TURNS) return TileWalk(listed, count, w2_tiles, BAND, 0, gridDim.x);  // the queue goes on to them
    // In the last round of the first product some clusters have no tile. They load as many bytes of the
    // down weights instead.
    const int busy = up_tiles.total % clusters, rounds = (hidden + w2_k / 2) / w2_k * (2 / SecondProduct::HALVES);
    const int order = ((cluster < busy ? clusters : 0) + cluster - busy) * CLUSTER + rank;
    const int free_blocks = up_tiles.total > clusters && busy ? (clusters - busy) * CLUSTER : 0;
    return TileWalk(listed, count, w2_tiles, BAND, order, gridDim.x, free_blocks, rounds);
  };
#elif SECOND
  const int row_parts = 0;  // an earlier kernel has stored them
  auto down_tiles = [&] { return TileWalk(listed, count, w2_tiles, BAND, blockIdx.x, gridDim.x); };
#endif

  Stage<TileQueue::SLOTS> slot;
  // the first tile of a product, where the queue tells it, too
  constexpr bool TOLD = FIRST && SECOND && !TAKES_TURNS;
  auto heard = [&](TileWalk tiles) {
    if (TOLD) tiles.go_to(queue.hear(slot));
    return tiles;
  };
  auto told_to_others = [&](TileWalk tiles, int first) {
    if (!TOLD) return tiles;
    tiles.go_to(__shfl_sync(~0u, first, 0));
    if (threadIdx.x % 32 == 0) queue.tell(slot, tiles.packed());
    slot.advance();
    return tiles;
  };
  if (producer) {
    Stage<STAGES> next;
    if (loads_weights) {
      [[maybe_unused]] int first = 0, earlier = 0;
#if FIRST
      if (TOLD && threadIdx.x % 32 == 0) first = queue.take();
      first = load_weights(up, told_to_others(up_tiles, first), ring, rank * HALF_ROWS, queue, 0, slot, next);
      earlier = up_tiles.total;
#endif
#if SECOND
      load_weights(down, told_to_others(down_tiles(), first - earlier), ring, 0, queue, earlier, slot, next);
#endif
      return;
    }
    int step = warp - (4 * WARPGROUPS + 1);
    for (int i = 0; i < step; i++) next.advance();
    // With one tile per block, the next kernel would find room on the SMs while this one still loads, and
    // delay it.
    auto launch_dependents = [] { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); };
#if FIRST
    if (!SECOND && up_tiles.total > up_tiles.stride) launch_dependents();
#if GATHERS
    __shared__ u32 begins[TOKEN_WARPS][TILE_TOKENS];
    gather_tokens(up, heard(up_tiles), ring, tokens, gathered_pairs, top_k, begins[step], queue, slot, next, step);
#else
    load_tokens(up, heard(up_tiles), ring, tiles, 0, queue, slot, next, step);
#endif
#endif
#if SECOND
    const TileWalk walk = heard(down_tiles());
    if (FIRST || walk.total > walk.stride) launch_dependents();
    load_tokens(down, walk, ring, tiles, row_parts, queue, slot, next, step);
#endif
    launch_dependents();
    return;
  }

  if (MOVE_REGISTERS) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
  // the peer must have initialised its barrier before maxima are sent to it
  if (CLUSTER > 1) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
  const int warpgroup = warp / 4;
  u8* const buffer = smem + STAGES * STAGE_BYTES + warpgroup * EPILOGUE_BYTES;
  Stage<STAGES> now, done;
#if FIRST
  auto up_epilogue = Epilogue<FirstProduct>::make(facts, buffer, shared(&maxima_received), rank);
  auto count_in = [&](const TileWalk& tile) {
    if (SECOND) count_stored(tiles + tile.row / TILE_TOKENS, warpgroup);
  };
  const TileWalk first_up = heard(up_tiles);  // before the slot is copied
  slot = multiply_tiles(up, first_up, ring, warpgroup, rank * HALF_ROWS, up_epilogue, queue, slot, now, done, count_in);
#endif
#if SECOND
  auto down_epilogue = Epilogue<SecondProduct>::make(facts, buffer, 0, 0);
  const TileWalk first_down = heard(down_tiles());
  multiply_tiles(down, first_down, ring, warpgroup, 0, down_epilogue, queue, slot, now, done, [](const TileWalk&) {});
#endif
}
