"""OpenAI's responses endpoint, without stored state: its bodies, and their translation to and from chats."""
