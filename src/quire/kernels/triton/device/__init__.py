"""Device code: what runs on the GPU, and the records that it is given."""
