"""The ledger: what a run costs, before it is run, in exact numbers and stated conventions."""
