"""The conformance kit: test cases and a catalogue of faults for any paged-attention kernel."""
