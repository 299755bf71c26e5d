#!/usr/bin/env bash
# From a running service to a blended answer with its receipt, by curl alone.
set -euo pipefail
cd "$(dirname "$0")"
URL=${1:-http://127.0.0.1:8000}
JSON=(-H 'Content-Type: application/json')

echo "Store four documents:"
curl -sS "$URL/ucm/v1/documents" "${JSON[@]}" -d @documents.json | python3 -c '
import json, sys
for one in json.load(sys.stdin)["data"]: print(" ", one["num_tokens"], "tokens,", one["num_chunks"], "chunks, id", one["id"])'

echo "Ask about them, in another order:"
curl -sS "$URL/v1/chat/completions" "${JSON[@]}" -d @question.json | python3 -c '
import json, sys
answer = json.load(sys.stdin)
print(" ", answer["choices"][0]["message"]["content"].strip())
print("Receipt:")
print(json.dumps(answer["kv_transfer_params"]["ucm"], indent=2))'
