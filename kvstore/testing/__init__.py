"""What tests of stores share: sealed blocks to put, and a suite that every way to a store passes."""
