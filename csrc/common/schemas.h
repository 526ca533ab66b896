// The launches that every backend implements, by schema.
//
// They write into tensors their caller allocates. Shapes: T tokens, D channels, V vocabulary, L + 1 weight rows.
// What each computes is written down in deepfast/reference/launchers.py.
#pragma once

namespace deepfast {

template <class Library>
void define_launches(Library& m) {
  m.def(
      "layer_norm_forward(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, "
      "float dropout_p, Tensor? seed, Tensor(a!)? sum, Tensor(b!) y, Tensor(c!) mean, "
      "Tensor(d!) rstd) -> ()");
  m.def(
      "layer_norm_backward(Tensor sum, Tensor dy, Tensor? dsum, Tensor? weight, Tensor mean, "
      "Tensor rstd, float dropout_p, Tensor? seed, Tensor(a!)? dx, Tensor(b!)? dresidual, "
      "Tensor(c!)? dweight, Tensor(d!)? dbias) -> ()");
  m.def(
      "activation_forward(Tensor h, str kind, float dropout_p, Tensor? seed, Tensor(a!) out) "
      "-> ()");
  m.def(
      "activation_backward(Tensor dout, Tensor saved, str kind, float dropout_p, Tensor? seed, "
      "Tensor(a!) dh) -> ()");
  m.def("advise_states(Tensor states) -> ()");
  m.def(
      "mix_rows(Tensor states, int[] sources, Tensor weight, int[] rows, Tensor? gain, "
      "Tensor? shift, Tensor(a!) out, int[] out_rows, bool accumulate) -> ()");
  m.def(
      "pull_rows(Tensor grads, int[] grad_slots, int[] rows, Tensor states, int[] sources, "
      "Tensor weight, Tensor? gain, Tensor? shift, Tensor(a!) out, int[] out_rows, "
      "bool accumulate, Tensor(b!)? dweight) -> ()");
  m.def(
      "boundary_forward(Tensor? branch, Tensor? residual, float dropout_p, Tensor? seed, "
      "Tensor(a!) states, int slot, int[] near, Tensor weight, int row, Tensor? gain, "
      "Tensor? shift, bool norm_source, float source_eps, Tensor? partial, Tensor? out_weight, "
      "Tensor? out_bias, float out_eps, Tensor(b!)? x, Tensor(c!)? out, "
      "Tensor(d!)? source_rstd, Tensor(e!)? out_mean, Tensor(f!)? out_rstd) -> ()");
  m.def(
      "boundary_backward(Tensor states, int slot, int[] near, Tensor weight, int row, "
      "Tensor? gain, Tensor? shift, bool norm_source, Tensor? partial, Tensor? out_weight, "
      "Tensor? out_bias, Tensor? source_rstd, Tensor? out_mean, Tensor? out_rstd, "
      "float dropout_p, Tensor? seed, Tensor? dx, Tensor? dout, Tensor(a!) grads, int grad_slot, "
      "int column, int[] pull_rows, int[] pull_slots, Tensor? pulled, Tensor(b!)? dbranch, "
      "Tensor(c!)? dresidual, Tensor(d!)? dweight, Tensor(e!)? dgain, Tensor(f!)? dshift, "
      "Tensor(g!)? dout_weight, Tensor(h!)? dout_bias) -> ()");
  m.def(
      "depth_mix_forward(Tensor[] sources, Tensor weight, Tensor? gain, Tensor? shift, bool norm, "
      "float eps, Tensor(a!) out, Tensor(b!)? mean, Tensor(c!)? rstd) -> ()");
  m.def(
      "depth_mix_backward(Tensor[] sources, Tensor weight, Tensor? gain, Tensor? shift, "
      "bool norm, Tensor? mean, Tensor? rstd, Tensor dout, Tensor(a!)[] dsources, "
      "Tensor(b!)? dweight, Tensor(c!)? dgain, Tensor(d!)? dshift) -> ()");
  m.def(
      "depth_attention_forward(Tensor[] sources, Tensor? query, Tensor? scores, bool norm, "
      "float eps, Tensor(a!) out, Tensor(b!) lse, Tensor(c!) most, Tensor(d!) total) -> ()");
  m.def(
      "depth_attention_backward(Tensor[] sources, Tensor? query, Tensor? scores, bool norm, "
      "float eps, Tensor out, Tensor most, Tensor total, Tensor dout, Tensor? dlse, "
      "Tensor(a!)[] dsources, Tensor(b!)? dquery, Tensor(c!)? dscores) -> ()");
  m.def(
      "cross_entropy(Tensor(a!) logits, Tensor target, float label_smoothing, int ignore_index, "
      "bool write_grad, Tensor(b!) loss, Tensor(c!) nll) -> ()");
  m.def(
      "peephole_lstm_forward(Tensor f, Tensor weight, Tensor peephole, Tensor? h0, Tensor? c0, "
      "Tensor? lengths, bool reverse, Tensor(a!) h, Tensor(b!) h_last, Tensor(c!) c_last, "
      "Tensor(d!)? c, Tensor(e!)? gates) -> ()");
  m.def(
      "peephole_lstm_backward(Tensor? dh, Tensor? dh_last, Tensor? dc_last, Tensor weight, "
      "Tensor peephole, Tensor? c0, Tensor? lengths, bool reverse, Tensor c, Tensor gates, "
      "Tensor(a!) df, Tensor(b!)? dh0, Tensor(c!)? dc0, Tensor(d!) dpeephole) -> ()");
}

}  // namespace deepfast
