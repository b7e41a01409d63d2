"""What a router remembers for its operators: ten minutes of figures, a minute of traffic, and the last requests' timelines."""
