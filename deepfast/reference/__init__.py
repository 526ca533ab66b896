"""The specification of every op in plain PyTorch, short, slow, also in float64; and its launches.

A launch is a function of one record with the operands, whose fields `deepfast.launches` lists. It
runs where nothing is compiled, on any device and dtype, and every backend is tested against it. It
writes results into tensors that the caller allocates. There are T tokens and D channels. States
have the storage dtype; weights, statistics and weight gradients have the compute dtype (fp32, or
fp64 for fp64). ``seed`` is a 0-dim int64 tensor, or None without dropout.
"""
