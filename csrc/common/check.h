// The one macro behind every check: a condition, then what was expected and what was got.
#pragma once

#include <torch/headeronly/util/Exception.h>

#define DEEPFAST_CHECK(condition, ...) STD_TORCH_CHECK(condition, "deepfast: ", __VA_ARGS__)
