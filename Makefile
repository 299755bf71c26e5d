# Three commands: make setup, make serve, make test. Each does what it needs of the ones before it.
SHELL := /bin/bash
VENV ?= .venv
CONFIG ?=
PORT ?=
TESTS ?= tests

.PHONY: setup serve test doctor lint clean

setup: ## environment, pinned packages, default model
	@VENV="$(VENV)" scripts/setup

serve: setup ## OpenAI-compatible service on port 8000; CONFIG=file.yaml, PORT=8001
	@$(VENV)/bin/ucm-ray serve $(if $(CONFIG),--config $(CONFIG)) $(if $(PORT),--port $(PORT))

test: setup ## every test; TESTS=tests/blend for one room
	@$(VENV)/bin/python -m pytest $(TESTS)

doctor: setup ## what is wrong with this machine or this configuration
	@$(VENV)/bin/ucm-ray doctor $(if $(CONFIG),--config $(CONFIG)) $(if $(PORT),--port $(PORT))

lint: setup
	@$(VENV)/bin/ruff check ucm_ray actors tests serve_app.py

clean: ## the environment, not the caches
	rm -rf $(VENV) build *.egg-info
