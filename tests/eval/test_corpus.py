import hashlib
import json

import pytest
from transformers import AutoTokenizer

from ucm_ray.bench.data import evaluation_prompts, held_out_prompts, load_documents, load_system_prompt
from ucm_ray.blend.sink import SINK_TEXT, sink_tokens


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return AutoTokenizer.from_pretrained(model_dir)


def test_documents_are_about_260_tokens_of_prose_with_two_questions_each(tokenizer):
    documents = load_documents()
    assert len(documents) >= 40
    assert len({document.id for document in documents}) == len(documents)
    for document in documents:
        assert 230 <= len(tokenizer.encode(document.text)) <= 290, document.id
        assert len(document.questions) == 2, document.id
        assert all(item.question.endswith("?") and item.answer for item in document.questions), document.id


def test_documents_share_no_passage_of_sixteen_tokens(tokenizer):
    seen = {}
    for document in load_documents():
        ids = tokenizer.encode(document.text)
        for start in range(len(ids) - 16):
            other = seen.setdefault(tuple(ids[start : start + 16]), document.id)
            assert other == document.id


@pytest.mark.parametrize("build, count", [(evaluation_prompts, 16), (held_out_prompts, 8)])
def test_prompts_hold_their_documents_token_by_token(tokenizer, build, count):
    prompts = build(tokenizer)
    assert len(prompts) == count
    stored = {document.id: tokenizer.encode(document.stored_text) for document in load_documents()}
    for prompt in prompts:
        assert len(set(prompt.document_ids)) == 12
        for name, (start, end) in zip(prompt.document_ids, prompt.document_spans, strict=True):
            assert list(prompt.token_ids[start:end]) == stored[name]
        assert prompt.question.question in tokenizer.decode(prompt.token_ids[prompt.question_start :])


def test_a_prompt_is_tokenized_as_its_text_would_be(tokenizer):
    for prompt in evaluation_prompts(tokenizer)[:4]:
        text = tokenizer.decode(prompt.token_ids)
        assert load_system_prompt() in text
        assert tokenizer.encode(text) == list(prompt.token_ids)


def test_every_prompt_asks_about_one_of_its_documents_and_no_document_is_asked_about_twice(tokenizer):
    for build, index in ((evaluation_prompts, 0), (held_out_prompts, 1)):
        asked = {document.questions[index]: document.id for document in load_documents()}
        subjects = []
        for prompt in build(tokenizer):
            subjects.append(asked[prompt.question])
            assert subjects[-1] in prompt.document_ids
        assert len(set(subjects)) == len(subjects)


def test_prompts_are_the_same_everywhere(tokenizer):
    prompts = evaluation_prompts(tokenizer) + held_out_prompts(tokenizer)
    orders = [[prompt.name, prompt.document_ids, prompt.question.question] for prompt in prompts]
    digest = hashlib.sha256(json.dumps(orders).encode()).hexdigest()
    assert digest.startswith("31cd9ff741af1ba8")
    assert evaluation_prompts(tokenizer, 3) == evaluation_prompts(tokenizer)[:3]


def test_more_documents_than_there_are_is_an_error(tokenizer):
    with pytest.raises(ValueError, match="documents_per_prompt: found 1000, expected 1 to"):
        evaluation_prompts(tokenizer, documents_per_prompt=1000)


@pytest.mark.parametrize(("max_model_len", "length"), [(4, 1), (1024, 256), (4096, 1024), (8192, None), (10**6, None)])
def test_the_sink_passage_takes_a_quarter_at_most_and_ends_with_its_paragraph(tokenizer, max_model_len, length):
    ids = sink_tokens(tokenizer, max_model_len)
    passage = tokenizer.encode(SINK_TEXT)
    assert 2000 < len(passage) <= 2048 and SINK_TEXT.endswith(".\n\n")
    assert ids == (passage if length is None else passage[-length:])
