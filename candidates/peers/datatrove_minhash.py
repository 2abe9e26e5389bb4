"""Near duplicates by datatrove, run by an interpreter that has it: called by data_benchmark.py.

    PYTHON datatrove_minhash.py INPUT_FOLDER OUTPUT_FOLDER WORKERS

INPUT_FOLDER holds WORKERS files of JSON lines. Words are cut at white space, which is datatrove's
fastest way; its default for English needs spaCy. Prints the number of documents that stay.
"""

import importlib.metadata  # datatrove uses it without importing it
import sys
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import (
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.word_tokenizers import WordTokenizer

BUCKETS, ROWS = 14, 8  # its own defaults, close to 21 bands of 6 rows


class AtSpaces(WordTokenizer):
    """Words are what is between white space."""

    def word_tokenize(self, text: str) -> list[str]:
        return text.split()

    def sent_tokenize(self, text: str) -> list[str]:
        raise NotImplementedError("MinHash needs no sentences")

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        raise NotImplementedError("MinHash needs no spans")


def main(source: str, output: str, num_workers: int) -> None:
    out = Path(output)
    config = MinhashConfig(n_grams=5, num_buckets=BUCKETS, hashes_per_bucket=ROWS)
    reader = JsonlReader(source)
    signatures, buckets, clusters = (str(out / name) for name in ("signatures", "buckets", "ids"))
    stages = [
        ([reader, MinhashDedupSignature(signatures, config, AtSpaces())], num_workers),
        ([MinhashDedupBuckets(signatures, buckets, config=config)], BUCKETS),
        ([MinhashDedupCluster(buckets, clusters, config=config)], 1),
        (
            [reader, MinhashDedupFilter(clusters),
             JsonlWriter(str(out / "kept"), compression=None)],
            num_workers,
        ),
    ]  # fmt: skip
    for number, (pipeline, num_tasks) in enumerate(stages):
        LocalPipelineExecutor(
            pipeline, tasks=num_tasks, workers=num_workers, logging_dir=str(out / f"logs{number}")
        ).run()
    lines = sum(
        file.read_bytes().count(b"\n") for file in (out / "kept").iterdir() if file.is_file()
    )
    print(f"kept {lines} with datatrove {importlib.metadata.version('datatrove')}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
