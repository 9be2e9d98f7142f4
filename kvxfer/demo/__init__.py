"""The demonstration: a real KV cache handed over between two processes, and the incident that kvxfer refuses."""
