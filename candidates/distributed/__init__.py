"""Training on several ranks with torch's own wrappers, as roles on trial.

    pytest -m M6 --candidate distributed.ddp --ranks 2

Each module has `ROLES` with distribute, accumulate and clip_grad_norm. With N the targets of the
window on all ranks and S_r the summed loss of rank r, the gradient is d/dp sum_r S_r / N:

* `ddp`: DDP averages over W ranks, so rank r backwards W * S_r / N;
* `ddp_sum`: a communication hook sums, so rank r backwards S_r / N;
* `ddp_after`: rank r backwards S_r, and the average is multiplied by W / N at the end;
* `fsdp2`: fully_shard of every layer, reduced by sums, so rank r backwards S_r / N.

Every rank needs the same number of microbatches in a window; their rows and targets may differ.
"""
