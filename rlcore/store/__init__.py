"""The object store, which is the truth of a run: what is done is what has a manifest.

- `objects`: named bytes with put-if-absent and compare-and-swap, on file://, s3:// and memory://.
- `paths`, `manifest`, `run_store`, `lease`: where things lie, what a committed stage says, how it
  is committed, and who may.
- `batch`: samples, scores and selections as Parquet. `files`: other files by digest.
- `lineage`: the proof that a run is whole.

Of these only `batch` and `lineage` need pyarrow, so nothing is imported here.
"""
