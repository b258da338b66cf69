"""Linear attention, delta rules, RWKV, xLSTM and the causal convolution."""
