"""The operators beside their peers and the machine's limits: `python -m candidates.tilelang.bench`."""
