"""Statistics of log-ratios: numpy only; every function takes log-weights, never weights.

Notation, per sampled token a after prefix h, in nats:
    D = log pi_s - log mu    discrepancy (numerics)
    L = log pi   - log pi_s  lag (stale weights)
    d = D + L                log-ratio
"""
