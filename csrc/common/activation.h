// The activations of a feed-forward block. No dependencies: kernel files include it without torch.
#pragma once

namespace deepfast {

enum class ActivationKind { relu, gelu };

}  // namespace deepfast
