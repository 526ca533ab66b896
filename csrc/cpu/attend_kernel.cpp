// The far passes of attention over depth, and their transpose.
//
//   s[r, k] = <q_r, v_k> rstd_k + b[r, k]         p = softmax over k, or relu(s)
//   attend       out[r] = sum_k p[r, k] v_k       each v_k read once for all rows r
//   attend_pull  out[j] = sum_l (p g_l + ds rstd_j (q_l - n_j <q_l, n_j> / D)),  n_j = v_j rstd_j
//                dq[l] = sum_{t, j} ds n_j,  db[l, j] = sum_t ds
//                with p = exp(s - most_l) / total_l and ds = p (<g_l, v_j> - delta_l)
//
// The softmax is computed online, a few sources at a time (Milakov, Gimelshein 2018), and again in
// backward. Tiles are those of mix_rows_kernel.cpp. Compiled once per instruction set.
#include "attend.h"
#include "tiles.h"

namespace deepfast {
namespace DEEPFAST_ISA {
namespace {

// ---- attend ------------------------------------------------------------------------------------

// The state of the online softmax of one token: for each row the largest score, the sum of
// exponentials, and the factor that the last sources have left of it.
template <class A>
struct Online {
  A *most, *total, *kept;
};

// Turns the scores of C sources into weights.
template <class A, int C, bool Softmax>
DEEPFAST_INLINE void weigh(A* scores, int64_t stride, const Online<A>& state) {
  constexpr int N = kLanes<A>;
  constexpr Lanes<N> lanes;
  const auto zero = broadcast(lanes, A(0));
  for (int64_t r = 0; r < stride; r += N) {
    if constexpr (!Softmax) {
      for (int c = 0; c < C; ++c) {
        const auto s = load(lanes, scores + c * stride + r);
        // NaN stays NaN.
        store(lanes, scores + c * stride + r, s <= zero ? zero : s);
      }
      store(lanes, state.kept + r, broadcast(lanes, A(1)));
      continue;
    }
    const auto before = load(lanes, state.most + r);
    auto most = before;
    for (int c = 0; c < C; ++c) {
      const auto s = load(lanes, scores + c * stride + r);
      most = s > most ? s : most;
    }
    const auto kept = exponential<A>(lanes, before - most);
    auto total = load(lanes, state.total + r) * kept;
    for (int c = 0; c < C; ++c) {
      const auto p = exponential<A>(lanes, load(lanes, scores + c * stride + r) - most);
      store(lanes, scores + c * stride + r, p);
      total += p;
    }
    store(lanes, state.most + r, most);
    store(lanes, state.total + r, total);
    store(lanes, state.kept + r, kept);
  }
}

template <class T>
class AttendTile {
  using A = compute_t<T>;

 public:
  AttendTile(const AttendRows& op, const TileShape& shape)
      : op_(op),
        shape_(shape),
        stride_(padded<A>(op.rows.count)),
        sums_(op.rows.count * shape.tokens * op.D),
        most_(stride_ * shape.tokens),
        total_(stride_ * shape.tokens),
        kept_(stride_),
        scores_(kGroup * stride_),
        query_(op.rows.count) {
    // Padding lanes hold numbers, so that no lane is slow.
    memset(scores_.get(), 0, kGroup * stride_ * sizeof(A));
    for (int64_t r = 0; r < op.rows.count; ++r) query_[r] = at<A>(op.query, op.rows[r] * op.D);
  }

  void begin(const Tile& tile) {
    constexpr A kNone = -__builtin_inf();
    for (int64_t t = tile.t0; t < tile.t1; ++t)
      for (int64_t r = 0; r < stride_; ++r) {
        const int64_t i = (t - tile.t0) * stride_ + r;
        const bool joins = is_softmax(op_) && op_.accumulate && r < op_.rows.count;
        most_[i] = joins ? *stat(r, 0, t) : (r < op_.rows.count ? kNone : A(0));
        total_[i] = joins ? *stat(r, 1, t) : A(0);
        if (r >= op_.rows.count) continue;
        A* sum = sums_ + tile_index(shape_, r, t - tile.t0, 0);
        if (!op_.accumulate) {
          memset(sum, 0, op_.D * sizeof(A));
          continue;
        }
        const T* out = row_of<T>(op_.out, op_.out_rows[r], t);
        const A factor = is_softmax(op_) ? total_[i] : A(1);
        for_lanes<A>(op_.D, [&](auto lanes, int64_t d) {
          store(lanes, sum + d, load(lanes, out + d) * factor);
        });
      }
  }

  template <int C>
  void add(const Tile& tile, int64_t k) {
    for (int64_t t = tile.t0; t < tile.t1; ++t) {
      const Streams<T, C> states(Chosen{op_.states, op_.sources}, k, tile, t);
      states.prefetch_row(op_.D);
      const T* const* v = states.row;
      for_groups<kAcross>(op_.rows.count, [&](auto across, int64_t r) {
        multiply_rows<A, C, across.n>(v, query_.get() + r, op_.D, scores_ + r, stride_);
      });
      for (int c = 0; c < C; ++c) {
        const A rstd = *at<A>(op_.source_rstd, op_.sources[k + c] * op_.T + t);
        for (int64_t r = 0; r < op_.rows.count; ++r) {
          A& score = scores_[c * stride_ + r];
          score *= rstd;
          if (op_.bias != nullptr)
            score += *at<A>(op_.bias, op_.rows[r] * op_.R + op_.sources[k + c]);
        }
      }
      const int64_t i = (t - tile.t0) * stride_;
      const Online<A> state{most_ + i, total_ + i, kept_};
      is_softmax(op_) ? weigh<A, C, true>(scores_, stride_, state)
                      : weigh<A, C, false>(scores_, stride_, state);
      for_groups<kAcross>(op_.rows.count, [&](auto across, int64_t r) {
        add_weighted<T, C, across.n>(v, scores_ + r, stride_, kept_ + r,
                                     sums_ + tile_index(shape_, r, t - tile.t0, 0),
                                     shape_.tokens * op_.D, op_.D);
      });
    }
  }

  void end(const Tile& tile) {
    for (int64_t r = 0; r < op_.rows.count; ++r)
      for (int64_t t = tile.t0; t < tile.t1; ++t) {
        const int64_t i = (t - tile.t0) * stride_ + r;
        const A* sum = sums_ + tile_index(shape_, r, t - tile.t0, 0);
        T* out = row_of<T>(op_.out, op_.out_rows[r], t);
        const A factor = is_softmax(op_) ? A(1) / total_[i] : A(1);
        for_lanes<A>(op_.D, [&](auto lanes, int64_t d) {
          store(lanes, out + d, load(lanes, sum + d) * factor);
        });
        if (!is_softmax(op_)) continue;
        *stat(r, 0, t) = most_[i];
        *stat(r, 1, t) = total_[i];
      }
  }

 private:
  // The row's largest score, or the sum of its exponentials.
  DEEPFAST_INLINE A* stat(int64_t r, int64_t entry, int64_t t) const {
    return at<A>(op_.out_stats, (op_.out_rows[r] * 2 + entry) * op_.T + t);
  }

  const AttendRows& op_;
  const TileShape& shape_;
  int64_t stride_;
  Scratch<A> sums_, most_, total_, kept_, scores_;
  Scratch<const A*> query_;
};

template <class T>
void attend_all(const AttendRows& op, int64_t begin, int64_t end) {
  const TileShape shape = TileShape::whole_rows(op.D);
  AttendTile<T> sums(op, shape);
  for_tiles(begin, end, op.D, shape, [&](const Tile& tile) {
    sums.begin(tile);
    for_groups<kGroup>(op.sources.count,
                       [&](auto group, int64_t k) { sums.template add<group.n>(tile, k); });
    sums.end(tile);
  });
}

// ---- pull --------------------------------------------------------------------------------------

template <class T>
class PullTile {
  using A = compute_t<T>;

 public:
  PullTile(const AttendPull& op, const TileShape& shape, int64_t chunk)
      : op_(op),
        shape_(shape),
        stride_(padded<A>(op.sources.count)),
        u_(op.sources.count * shape.tokens * op.D),
        rstd_(stride_ * shape.tokens),
        slope_(stride_ * shape.tokens),
        bias_(op.rows.count * stride_),
        dbias_(op.rows.count * stride_),
        scores_(kAcross * stride_),
        dots_(kAcross * stride_),
        query_(op.rows.count),
        v_(op.sources.count),
        dquery_(at<A>(op.dquery, chunk * op.rows.count * op.D)),
        dbias_out_(at<A>(op.dbias, chunk * op.rows.count * op.sources.count)) {
    for (auto* zero : {&rstd_, &slope_}) memset(zero->get(), 0, stride_ * shape.tokens * sizeof(A));
    for (auto* zero : {&bias_, &dbias_})
      memset(zero->get(), 0, op.rows.count * stride_ * sizeof(A));
    for (auto* zero : {&scores_, &dots_}) memset(zero->get(), 0, kAcross * stride_ * sizeof(A));
    for (int64_t l = 0; l < op.rows.count; ++l) {
      query_[l] = at<A>(op.query, op.rows[l] * op.D);
      if (op.bias == nullptr) continue;
      for (int64_t j = 0; j < op.sources.count; ++j)
        bias_[l * stride_ + j] = *at<A>(op.bias, op.rows[l] * op.R + op.sources[j]);
    }
  }

  void begin(const Tile& tile) {
    memset(slope_.get(), 0, stride_ * shape_.tokens * sizeof(A));
    for (int64_t j = 0; j < op_.sources.count; ++j)
      for (int64_t t = tile.t0; t < tile.t1; ++t) {
        rstd_[(t - tile.t0) * stride_ + j] = *at<A>(op_.source_rstd, op_.sources[j] * op_.T + t);
        A* u = u_ + tile_index(shape_, j, t - tile.t0, 0);
        if (op_.accumulate)
          load_row(row_of<T>(op_.out, op_.out_rows[j], t), u, op_.D);
        else
          memset(u, 0, op_.D * sizeof(A));
      }
  }

  // What rows [l, l + L) add.
  template <int L>
  void add(const Tile& tile, int64_t l) {
    for (int64_t t = tile.t0; t < tile.t1; ++t) {
      const Streams<T, L> grads(Chosen{op_.grads, op_.grad_slots}, l, tile, t);
      grads.prefetch_row(op_.D);
      const T* const* g = grads.row;
      for (int64_t j = 0; j < op_.sources.count; ++j)
        v_[j] = row_of<T>(op_.states, op_.sources[j], t);
      const T* const* v = v_.get();
      const A* const* q = query_.get() + l;
      for_groups<kGroup>(op_.sources.count, [&](auto across, int64_t j) {
        multiply_rows<A, L, across.n>(q, v + j, op_.D, scores_ + j, stride_);
        multiply_rows<A, L, across.n>(g, v + j, op_.D, dots_ + j, stride_);
      });
      for (int i = 0; i < L; ++i)
        is_softmax(op_) ? weights<true>(tile, t, l + i, i) : weights<false>(tile, t, l + i, i);
      for_groups<kGroup>(op_.sources.count, [&](auto across, int64_t j) {
        pull_weighted<T, L, across.n>(
            g, q, dquery_ == nullptr ? nullptr : dquery_ + l * op_.D, v + j, scores_ + j, dots_ + j,
            stride_, u_ + tile_index(shape_, j, t - tile.t0, 0), shape_.tokens * op_.D, op_.D);
      });
    }
  }

  void end(const Tile& tile) {
    for (int64_t j = 0; j < op_.sources.count; ++j)
      for (int64_t t = tile.t0; t < tile.t1; ++t) {
        const int64_t i = (t - tile.t0) * stride_ + j;
        const A* u = u_ + tile_index(shape_, j, t - tile.t0, 0);
        const A back = rstd_[i] * rstd_[i] * slope_[i] / static_cast<A>(op_.D);
        const T* v = row_of<T>(op_.states, op_.sources[j], t);
        T* out = row_of<T>(op_.out, op_.out_rows[j], t);
        for_lanes<A>(op_.D, [&](auto lanes, int64_t d) {
          store(lanes, out + d, load(lanes, u + d) - back * load(lanes, v + d));
        });
      }
  }

  void finish() {
    if (dbias_out_ == nullptr) return;
    for (int64_t l = 0; l < op_.rows.count; ++l)
      for (int64_t j = 0; j < op_.sources.count; ++j)
        dbias_out_[l * op_.sources.count + j] = dbias_[l * stride_ + j];
  }

 private:
  // Turns <q, v_j> and <g, v_j> of a row, the i-th of its group, into p_j and c_j = ds_j rstd_j.
  template <bool Softmax>
  DEEPFAST_INLINE void weights(const Tile& tile, int64_t t, int64_t row, int i) {
    constexpr int N = kLanes<A>;
    constexpr Lanes<N> lanes;
    const int64_t token = (t - tile.t0) * stride_;
    const A* stats = at<A>(op_.stats, op_.rows[row] * 3 * op_.T + t);
    const A most = Softmax ? *stats : A(0);
    const A scale = Softmax ? A(1) / stats[op_.T] : A(1);
    const A delta = Softmax ? stats[2 * op_.T] : A(0);
    const auto zero = broadcast(lanes, A(0));
    for (int64_t j = 0; j < stride_; j += N) {
      A *score = scores_ + i * stride_ + j, *dot = dots_ + i * stride_ + j;
      const auto rstd = load(lanes, rstd_ + token + j);
      const auto raw = load(lanes, score) * rstd;
      const auto s = raw + load(lanes, bias_ + row * stride_ + j);
      vec_t<A, N> p, ds;
      if constexpr (Softmax) {
        // Rounding can make s larger than the largest score by its last digit.
        const auto below = s - most;
        p = exponential<A>(lanes, below > zero ? zero : below) * scale;
        ds = p * (load(lanes, dot) - delta);
      } else {
        p = s <= zero ? zero : s;
        ds = s <= zero ? zero : load(lanes, dot);
      }
      store(lanes, score, p);
      store(lanes, dot, ds * rstd);
      A* slope = slope_ + token + j;
      store(lanes, slope, load(lanes, slope) + ds * raw);
      A* dbias = dbias_ + row * stride_ + j;
      store(lanes, dbias, load(lanes, dbias) + ds);
    }
  }

  const AttendPull& op_;
  const TileShape& shape_;
  int64_t stride_;
  Scratch<A> u_, rstd_, slope_, bias_, dbias_, scores_, dots_;
  Scratch<const A*> query_;
  Scratch<const T*> v_;
  A *dquery_, *dbias_out_;
};

template <class T>
void pull_all(const AttendPull& op, int64_t begin, int64_t end, int64_t chunk) {
  const TileShape shape = TileShape::whole_rows(op.D);
  PullTile<T> sums(op, shape, chunk);
  for_tiles(begin, end, op.D, shape, [&](const Tile& tile) {
    sums.begin(tile);
    for_groups<kAcross>(op.rows.count,
                        [&](auto group, int64_t l) { sums.template add<group.n>(tile, l); });
    sums.end(tile);
  });
  sums.finish();
}

}  // namespace

void attend_rows(const AttendRows& op, int64_t begin, int64_t end, int64_t) {
  with_storage(op.storage, [&](auto type) { attend_all<decltype(type)>(op, begin, end); });
}

void attend_pull(const AttendPull& op, int64_t begin, int64_t end, int64_t chunk) {
  with_storage(op.storage, [&](auto type) { pull_all<decltype(type)>(op, begin, end, chunk); });
}

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
