"""What speculative decoding brings and costs on this machine."""
