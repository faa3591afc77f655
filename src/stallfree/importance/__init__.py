"""Importance sampling: plans drawn from losses, served preferably from the cache, and packages of samples."""
