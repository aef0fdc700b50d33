"""Prefill and decode on GPUs of their own."""
