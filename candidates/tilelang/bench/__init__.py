"""`python -m candidates.tilelang.bench`: the operators beside their peers and the machine."""
