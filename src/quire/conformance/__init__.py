"""The conformance kit: cases that can fail, faults that are named, for anybody's paged attention."""
