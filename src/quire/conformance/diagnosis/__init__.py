"""From a wrong output to the name of the fault, and how reliable that is."""
