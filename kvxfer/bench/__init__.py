"""The benchmark: moves pages between two processes, checks every byte that arrived, and says what memcpy would take."""
