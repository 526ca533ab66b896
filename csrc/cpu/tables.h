// The kernels of one instruction set, by name.
#pragma once

#include "kernels.h"

namespace deepfast {
namespace DEEPFAST_ISA {

template <class P>
struct pointee;
template <class T>
struct pointee<T*> {
  using type = T;
};

void layer_norm_forward(const LayerNorm&, int64_t begin, int64_t end, int64_t chunk);
void layer_norm_backward(const LayerNorm&, int64_t begin, int64_t end, int64_t chunk);
void mix(const Mix&, int64_t begin, int64_t end, int64_t chunk);
void pull(const Pull&, int64_t begin, int64_t end, int64_t chunk);
void boundary_forward(const Boundary&, int64_t begin, int64_t end, int64_t chunk);
void boundary_backward(const BoundaryGrad&, int64_t begin, int64_t end, int64_t chunk);
void depth_mix_forward(const DepthMix&, int64_t begin, int64_t end, int64_t chunk);
void depth_mix_backward(const DepthMix&, int64_t begin, int64_t end, int64_t chunk);
void depth_attention_forward(const DepthAttention&, int64_t begin, int64_t end, int64_t chunk);
void depth_attention_backward(const DepthAttention&, int64_t begin, int64_t end, int64_t chunk);
void activation_forward(const Activation&, int64_t begin, int64_t end, int64_t chunk);
void activation_backward(const Activation&, int64_t begin, int64_t end, int64_t chunk);
void cross_entropy(const CrossEntropy&, int64_t begin, int64_t end, int64_t chunk);
void peephole_lstm_pack(const PeepholeLstm&, int64_t begin, int64_t end, int64_t chunk);
void peephole_lstm_pack_transposed(const PeepholeLstm&, int64_t begin, int64_t end, int64_t chunk);
void peephole_lstm_forward(const PeepholeLstm&, int64_t begin, int64_t end, int64_t chunk);
void peephole_lstm_backward(const PeepholeLstm&, int64_t begin, int64_t end, int64_t chunk);

}  // namespace DEEPFAST_ISA
}  // namespace deepfast
