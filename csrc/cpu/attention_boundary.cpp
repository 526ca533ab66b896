// deepfast::attention_boundary_{forward,backward}, attend_rows and attend_pull on the CPU: checks,
// threads, registration.
#include "op.h"

namespace deepfast {
namespace {

using Pointers = std::vector<const void*>;

bool is_softmax(const std::string& kind) {
  DEEPFAST_CHECK(kind == "softmax" || kind == "relu",
                 "attention_boundary: expected kind softmax or relu, got ", kind);
  return kind == "softmax";
}

// What all four launches know of the rows: queries, biases, and the numbers of each row and token.
struct Rows {
  Storage storage;
  int64_t tokens, dim, count;
  bool softmax, has_stats;
  const char *query, *rstd;
  char* stats;
  std::vector<Weights> bias;  // one, or none

  Rows(const Tensor& states, const Tensor& query, const OptionalTensor& bias_,
       const std::string& kind, const Tensor& source_rstd, const OptionalTensor& stats_)
      : storage(storage_of(states)),
        tokens(states.size(1)),
        dim(states.size(2)),
        count(query.size(0)),
        softmax(is_softmax(kind)),
        has_stats(stats_.has_value()) {
    this->query = static_cast<const char*>(parameter(OptionalTensor(query), storage, count * dim));
    rstd =
        static_cast<const char*>(parameter(OptionalTensor(source_rstd), storage, count * tokens));
    stats = static_cast<char*>(parameter(stats_, storage, count * 3 * tokens));
    if (bias_.has_value()) bias.emplace_back(*bias_, storage, dim);
  }
  int64_t size() const { return compute_size(storage); }
  Pointers queries(const Indices& rows) const { return rows_of(query, checked(rows), dim, size()); }
  Pointers rstds(const Indices& states) const {
    return rows_of(rstd, checked(states), tokens, size());
  }
  // Entry 0 is the largest score, 1 the sum of exponentials, 2 <g, x>.
  std::vector<void*> statistic(const Indices& rows, int64_t entry) const {
    std::vector<void*> out;
    for (int64_t r : checked(rows))
      out.push_back(stats == nullptr ? nullptr : stats + (r * 3 + entry) * tokens * size());
    return out;
  }
  // Null pointers mean no bias.
  Pointers biases(const Indices& rows, const Indices& columns) const {
    return bias.empty() ? Pointers{} : bias[0].pick(rows, columns);
  }
  const Indices& checked(const Indices& indices) const {
    for (int64_t i : indices)
      DEEPFAST_CHECK(i >= 0 && i < count, "attention_boundary: row ", i, " of ", count);
    return indices;
  }
};

const void* const* or_null(const Pointers& p) { return p.empty() ? nullptr : p.data(); }

const void* const* constant(const std::vector<void*>& p) {
  return const_cast<const void* const*>(p.data());
}

void attend_rows(Tensor states, Indices sources, Tensor query, OptionalTensor bias,
                 std::string kind, Tensor source_rstd, Indices rows, Tensor out,
                 OptionalTensor out_stats, Indices out_rows, bool accumulate) {
  check_buffer(states);
  check_buffer(out, states);
  const Rows r(states, query, bias, kind, source_rstd, std::nullopt);
  DEEPFAST_CHECK(rows.size() == out_rows.size(), "attend_rows: expected ", rows.size(),
                 " out_rows, got ", out_rows.size());
  DEEPFAST_CHECK(r.softmax == out_stats.has_value(), "attend_rows: softmax needs out_stats");
  const auto source = slots(states, sources);
  const auto target = slots(out, out_rows);
  const auto queries = r.queries(rows), rstds = r.rstds(sources), biases = r.biases(rows, sources);
  auto* stats = static_cast<char*>(parameter(out_stats, r.storage, out.size(0) * 2 * r.tokens));
  std::vector<void*> most, total;
  for (int64_t b : out_rows) {
    char* p = stats == nullptr ? nullptr : stats + b * 2 * r.tokens * r.size();
    most.push_back(p);
    total.push_back(p == nullptr ? nullptr : p + r.tokens * r.size());
  }
  Attend op{};
  op.storage = r.storage;
  op.dim = r.dim;
  op.rows = static_cast<int64_t>(rows.size());
  op.sources = static_cast<int64_t>(sources.size());
  op.softmax = r.softmax;
  op.accumulate = accumulate;
  op.source = source.data();
  op.rstd = rstds.data();
  op.query = queries.data();
  op.bias = or_null(biases);
  op.out = target.data();
  op.most = most.data();
  op.total = total.data();
  Chunks(r.tokens).run([&](int64_t begin, int64_t end, int64_t chunk) {
    kernels(op.storage).attend(op, begin, end, chunk);
  });
}

// Adds the gradients of queries and sets those of biases.
void store_gradients(const Rows& r, const Indices& rows, const Indices& columns,
                     const Partial& queries, const Partial& biases, const OptionalTensor& dquery,
                     const OptionalTensor& dbias) {
  std::vector<int64_t> offsets;
  for (int64_t row : rows) offsets.push_back(row * r.dim * r.size());
  queries.add_into(static_cast<char*>(parameter(dquery, r.storage, r.count * r.dim)), offsets,
                   r.dim);
  if (!dbias.has_value()) return;
  offsets.clear();
  for (int64_t row : rows)
    for (int64_t column : columns) offsets.push_back(r.bias[0].offset(row, column));
  biases.scatter_into(static_cast<char*>(parameter(dbias, r.storage, r.count * r.count)), offsets,
                      1);
}

void attend_pull(Tensor grads, Indices grad_slots, Indices rows, Tensor states, Indices sources,
                 Tensor query, OptionalTensor bias, std::string kind, Tensor source_rstd,
                 OptionalTensor stats, Tensor out, Indices out_rows, bool accumulate,
                 OptionalTensor dquery, OptionalTensor dbias) {
  check_buffer(states);
  check_buffer(grads, states);
  check_buffer(out, states);
  const Rows r(states, query, bias, kind, source_rstd, stats);
  DEEPFAST_CHECK(sources.size() == out_rows.size() && rows.size() == grad_slots.size(),
                 "attend_pull: expected as many out_rows as sources and grad_slots as rows");
  DEEPFAST_CHECK(r.softmax == stats.has_value(), "attend_pull: softmax needs stats");
  DEEPFAST_CHECK(bias.has_value() || !dbias.has_value(), "attend_pull: dbias needs a bias");
  const auto grad = slots(grads, grad_slots), source = slots(states, sources);
  const auto target = slots(out, out_rows);
  const auto queries = r.queries(rows), rstds = r.rstds(sources), biases = r.biases(rows, sources);
  const auto most = r.statistic(rows, 0), total = r.statistic(rows, 1),
             delta = r.statistic(rows, 2);
  // The partial sums of all queries are large: few chunks keep them small.
  const Chunks chunks(r.tokens, 8);
  const auto count = static_cast<int64_t>(rows.size());
  const auto width = static_cast<int64_t>(sources.size());
  Partial query_sums(dquery.has_value(), chunks, count * r.dim, r.storage);
  Partial bias_sums(dbias.has_value(), chunks, count * width, r.storage);
  AttendPull op{};
  op.storage = r.storage;
  op.dim = r.dim;
  op.rows = count;
  op.sources = width;
  op.softmax = r.softmax;
  op.accumulate = accumulate;
  op.grad = grad.data();
  op.source = source.data();
  op.rstd = rstds.data();
  op.query = queries.data();
  op.bias = or_null(biases);
  op.most = constant(most);
  op.total = constant(total);
  op.delta = constant(delta);
  op.out = target.data();
  op.dquery = query_sums.get();
  op.dbias = bias_sums.get();
  chunks.run([&](int64_t begin, int64_t end, int64_t chunk) {
    kernels(op.storage).attend_pull(op, begin, end, chunk);
  });
  store_gradients(r, rows, sources, query_sums, bias_sums, dquery, dbias);
}

// What forward and backward of a boundary share, and the tables that it points into.
struct Operands {
  std::vector<Matrix> source;
  Pointers rstd, bias;
  AttentionBoundary op{};

  Operands(const Tensor& states, int64_t k, const Indices& near, const Rows& r,
           const OptionalTensor& partial, const OptionalTensor& partial_stats,
           const OptionalTensor& out_norm_weight, const OptionalTensor& out_norm_bias, bool out_rms,
           double dropout_p, const OptionalTensor& seed)
      : source(slots(states, near)), rstd(r.rstds(near)), bias(r.biases({k}, near)) {
    Boundary& base = op.base;
    base.storage = r.storage;
    base.dim = r.dim;
    base.near = static_cast<int64_t>(near.size());
    base.out_rms = out_rms;
    base.dropout = dropout(seed, dropout_p);
    base.state = slot(states, k);
    base.source = source.data();
    base.partial = matrix(partial, r.storage, r.tokens, r.dim);
    base.out_norm_weight = parameter(out_norm_weight, r.storage, r.dim);
    base.out_norm_bias = parameter(out_norm_bias, r.storage, r.dim);
    op.softmax = r.softmax;
    op.query = r.queries({k})[0];
    op.rstd = rstd.data();
    op.bias = or_null(bias);
    auto* far = static_cast<char*>(parameter(partial_stats, r.storage, 2 * r.tokens));
    DEEPFAST_CHECK(!r.softmax || partial.has_value() == partial_stats.has_value(),
                   "attention_boundary: partial and partial_stats belong together");
    op.partial_most = far;
    op.partial_total = far == nullptr ? nullptr : far + r.tokens * r.size();
    op.own_rstd = const_cast<void*>(r.rstds({k})[0]);
    op.most = r.statistic({k}, 0)[0];
    op.total = r.statistic({k}, 1)[0];
    DEEPFAST_CHECK(!r.softmax || r.has_stats, "attention_boundary: softmax needs stats");
  }
};

void attention_boundary_forward(OptionalTensor branch, OptionalTensor residual, double dropout_p,
                                OptionalTensor seed, Tensor states, int64_t k, Indices near,
                                Tensor query, OptionalTensor bias, std::string kind, double eps,
                                OptionalTensor partial, OptionalTensor partial_stats,
                                OptionalTensor out_norm_weight, OptionalTensor out_norm_bias,
                                double out_eps, bool out_rms, OptionalTensor x, OptionalTensor out,
                                Tensor source_rstd, OptionalTensor stats, OptionalTensor out_mean,
                                OptionalTensor out_rstd) {
  check_buffer(states);
  const Rows r(states, query, bias, kind, source_rstd, stats);
  Operands operands(states, k, near, r, partial, partial_stats, out_norm_weight, out_norm_bias,
                    out_rms, dropout_p, seed);
  AttentionBoundary& op = operands.op;
  op.eps = eps;
  op.base.out_eps = out_eps;
  op.base.branch = matrix(branch, r.storage, r.tokens, r.dim);
  op.base.residual = matrix(residual, r.storage, r.tokens, r.dim);
  op.base.x = matrix(x, r.storage, r.tokens, r.dim);
  op.base.out = matrix(out, r.storage, r.tokens, r.dim);
  op.base.out_mean = parameter(out_mean, r.storage, r.tokens);
  op.base.out_rstd = parameter(out_rstd, r.storage, r.tokens);
  DEEPFAST_CHECK(!out.has_value() || (out_rms != out_mean.has_value() && out_rstd.has_value()),
                 "attention_boundary: expected out_rstd, and out_mean or out_rms");
  Chunks(r.tokens).run([&](int64_t begin, int64_t end, int64_t chunk) {
    kernels(op.base.storage).attention_boundary_forward(op, begin, end, chunk);
  });
}

void attention_boundary_backward(
    Tensor states, int64_t k, Indices near, Tensor query, OptionalTensor bias, std::string kind,
    OptionalTensor partial, OptionalTensor partial_stats, OptionalTensor out_norm_weight,
    OptionalTensor out_norm_bias, bool out_rms, Tensor source_rstd, OptionalTensor stats,
    OptionalTensor out_mean, OptionalTensor out_rstd, double dropout_p, OptionalTensor seed,
    OptionalTensor dx, OptionalTensor dout, Tensor grads, int64_t grad_slot, Indices pull_rows,
    Indices pull_slots, OptionalTensor pulled, OptionalTensor dbranch, OptionalTensor dresidual,
    OptionalTensor dquery, OptionalTensor dbias, OptionalTensor dout_norm_weight,
    OptionalTensor dout_norm_bias) {
  check_buffer(states);
  check_buffer(grads, states);
  const Rows r(states, query, bias, kind, source_rstd, stats);
  Operands operands(states, k, near, r, partial, partial_stats, out_norm_weight, out_norm_bias,
                    out_rms, dropout_p, seed);
  Boundary& forward = operands.op.base;
  forward.out_mean = parameter(out_mean, r.storage, r.tokens);
  forward.out_rstd = parameter(out_rstd, r.storage, r.tokens);
  DEEPFAST_CHECK(dx.has_value() || dout.has_value(), "attention_boundary: no gradient came in");
  DEEPFAST_CHECK(!dout.has_value() || (out_rms != out_mean.has_value() && out_rstd.has_value()),
                 "attention_boundary: expected out_rstd, and out_mean or out_rms");
  DEEPFAST_CHECK(pull_rows.size() == pull_slots.size(), "attention_boundary: expected ",
                 pull_rows.size(), " pull_slots, got ", pull_slots.size());
  DEEPFAST_CHECK(bias.has_value() || !dbias.has_value(), "attention_boundary: dbias needs a bias");
  const Chunks chunks(r.tokens, 8);
  const auto pull_grad = slots(grads, pull_slots);
  const auto pull_query = r.queries(pull_rows), pull_bias = r.biases(pull_rows, {k});
  const auto most = r.statistic(pull_rows, 0), total = r.statistic(pull_rows, 1),
             delta = r.statistic(pull_rows, 2);
  const auto pulls = static_cast<int64_t>(pull_rows.size());
  Partial query_sums(dquery.has_value(), chunks, pulls * r.dim, r.storage);
  Partial bias_sums(dbias.has_value(), chunks, pulls, r.storage);
  Partial out_norm_weight_sums(dout_norm_weight.has_value(), chunks, r.dim, r.storage);
  Partial out_norm_bias_sums(dout_norm_bias.has_value(), chunks, r.dim, r.storage);

  AttentionBoundaryGrad op{};
  op.forward = operands.op;
  op.base.forward = forward;
  op.base.dx = matrix(dx, r.storage, r.tokens, r.dim);
  op.base.dout = matrix(dout, r.storage, r.tokens, r.dim);
  op.base.grad = slot(grads, grad_slot);
  op.base.pulls = pulls;
  op.base.own_row_reads = pulls > 0 && pull_rows[0] == k;
  op.base.pull_grad = pull_grad.data();
  op.base.pulled = matrix(pulled, r.storage, r.tokens, r.dim);
  op.base.dbranch = matrix(dbranch, r.storage, r.tokens, r.dim);
  op.base.dresidual = matrix(dresidual, r.storage, r.tokens, r.dim);
  op.base.dout_norm_weight = out_norm_weight_sums.get();
  op.base.dout_norm_bias = out_norm_bias_sums.get();
  op.pull_query = pull_query.data();
  op.pull_bias = or_null(pull_bias);
  op.pull_most = constant(most);
  op.pull_total = constant(total);
  op.pull_delta = constant(delta);
  op.delta = r.statistic({k}, 2)[0];
  op.dquery = query_sums.get();
  op.dbias = bias_sums.get();
  chunks.run([&](int64_t begin, int64_t end, int64_t chunk) {
    kernels(op.base.forward.storage).attention_boundary_backward(op, begin, end, chunk);
  });
  out_norm_weight_sums.sum_into(parameter(dout_norm_weight, r.storage, r.dim));
  out_norm_bias_sums.sum_into(parameter(dout_norm_bias, r.storage, r.dim));
  store_gradients(r, pull_rows, {k}, query_sums, bias_sums, dquery, dbias);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepfast, CPU, m) {
  m.impl("attend_rows", TORCH_BOX(&attend_rows));
  m.impl("attend_pull", TORCH_BOX(&attend_pull));
  m.impl("attention_boundary_forward", TORCH_BOX(&attention_boundary_forward));
  m.impl("attention_boundary_backward", TORCH_BOX(&attention_boundary_backward));
}

}  // namespace deepfast
