"""OpenAI's POST /v1/responses, stateless."""
