"""The conformance kit: a suite of test cases and a catalogue of faults for any paged-attention kernel."""
