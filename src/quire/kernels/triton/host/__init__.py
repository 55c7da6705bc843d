"""Host code: chooses tiles, compiles programs once and launches them."""
