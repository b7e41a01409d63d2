"""Pulls of the beginnings of prompts from any worker that holds them."""
