"""The only table of tolerances. The oracle is float64; the operations work in float32."""

# A decision this close to its threshold may fall either way: a uniform and its threshold, a
# token's preceding mass and top_p, a token's relative weight and min_p. Such cases are counted.
TIE = 1e-5

# Relative error of one float32 probability (exponent, normaliser). It bounds what cancellation in
# target - draft does to the residual.
PROBABILITY = 2e-6

# Weights below 2**-126 may count as 0; twice that, as they are rounded before they are compared.
FLUSHED_WEIGHT = 2.0**-125

# Log-probabilities and statistics: absolute, and relative to the value.
LOGPROB = 2e-5
STATS = 2e-5

# Largest share of replayed rows whose result hangs on a tie.
TIE_SHARE = 0.03
# Of trees, where a sequence takes several decisions at every node.
TREE_TIE_SHARE = 0.05

# A chi-square test fails below this probability of a larger statistic, and its control above it.
CHI_SQUARE_P = 1e-3

# Relative error of the exponential behind Gumbel noise.
NOISE = 1e-6
