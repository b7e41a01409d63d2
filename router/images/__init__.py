"""Images that clients refer to: fetched within limits, and checked."""
