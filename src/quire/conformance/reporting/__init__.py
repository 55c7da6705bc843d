"""Reports of a run: terminal, JSON, JUnit, HTML, and the generated documents."""
