"""Measurements that the project's claims rest on; results are committed beside them."""
