"""A deterministic simulator: the real cores of ``kvxfer.protocol`` on simulated machines, lanes and clocks, under
faults.

Everything that happens follows from one seed. Memory is simulated chunk by chunk with its provenance, and the rules
S1-S8 are checked after every event. ``runner.run_seed`` runs one seed; ``kvxfer sim`` runs many.
"""
