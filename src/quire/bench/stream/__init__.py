"""The serving-stream benchmark: the steps of a serving engine, generated once from a seed and replayed by every implementation."""
