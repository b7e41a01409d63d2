"""The OpenAI endpoints after a body is decoded, from validation to the first byte of the answer.

Owns the order of the steps and the ids of requests.
"""

from __future__ import annotations

import logging
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
from litestar.types import ASGIApp

from core.config_router import RouterSection
from core.errors import EncoderInputMissing, InvalidRequest, ModelNotFound, NoWorker
from core.ids import IdSource, new_hex_id, new_seed
from core.log import event
from core.wire.sampling import SamplingParams
from router.dispatch.engine_api import EngineAnswer
from router.dispatch.policy import choose_weights
from router.dispatch.types import Submission
from router.dispatch.worker_gateway import WorkerGateway
from router.http.body_checks import check_num_values
from router.http.caller import Caller
from router.http.errors import RequestFailure
from router.http.passed_on import PassedOn
from router.http.responses_answer import ResponsesAnswer
from router.http.split_answer import SplitAnswer
from router.http.streaming import EventStream, HttpAnswer
from router.http.time_limits import TimeLimits
from router.images.reader import RequestImageReader, find_images
from router.metrics import RouterMetrics
from router.openai.chat_output import ChatOutput, has_thinking_tags, opens_reasoning
from router.openai.logprobs import TokenTexts
from router.openai.postprocess import RequestOutput
from router.openai.preprocess import (
    ImageSupport,
    Prompt,
    PromptReader,
    check_messages,
    check_num_choices,
    check_rendered,
    continued_text,
    max_text_tokens,
)
from router.openai.requests import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from router.openai.responses import ChatShaper, CompletionShaper, Envelope
from router.openai.sampling import (
    ModelLimits,
    OutputOptions,
    check_num_logprobs,
    check_ranges,
    check_supported,
    check_token_ids,
    load_failure_policy,
    output_options,
    params_of_prompt,
    shared_params,
)
from router.openai.served_model import ServedModel
from router.openai.structured import GrammarGate, field_of_form, given_form
from router.openai.text_pool import TextPool
from router.openai.tokenized import Detokenized, Tokenized
from router.openai.tool_choice import tool_use
from router.rendered.bodies import CHAT, EngineBody, engine_body, timed_body
from router.rendered.legs import TwoLegs
from router.rendered.renderer import EngineRefusal, EngineRenderer
from router.rendered.splitting import OutputSplitter
from router.responses_api.requests import ResponsesRequest, check_responses_supported
from router.responses_api.shaper import ResponsesOutput, ResponsesShaper
from router.responses_api.translation import chat_request, failure_in_words_of_responses, in_words_of_responses
from router.tools.formats import AUTO, has_known_calls, tool_format

logger = logging.getLogger(__name__)

_ONLY_IN_CHATS = (
    "vLLM engines serve tools, forms, images, reasoning.effort and adapters through /v1/chat/completions only: use that"
)
_SPLIT_IN_CHATS = "vLLM engines with a reasoning parser serve /v1/chat/completions only: use that"
_UNKNOWN_CALLS = (
    "the chat template reads tools and has no mark of a known format of calls: they stay text; set router.tool_format if one "
    "fits, unless vLLM engines split the answers"
)
_UNKNOWN_TOKENS = (
    "the chat template writes special tokens that tokenizer_config.json does not name: they are left out of prompts; add them "
    "there, with the value null if the model has none"
)
_ID_PREFIXES = {CompletionRequest: "cmpl-", ChatCompletionRequest: "chatcmpl-"}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that can be submitted. The answer is split by this router, or by the engine to which ``split`` went."""

    request: CompletionRequest | ChatCompletionRequest
    options: OutputOptions
    prompts: list[Prompt]
    limits: ModelLimits
    shared: SamplingParams
    split: EngineBody | ChatOutput | ResponsesOutput | None
    form_field: str = ""  # gives the form of the output; empty if none does

    @property
    def splitting(self) -> EngineBody | ChatOutput | None:
        """How the answer is split, whatever its shape."""
        return self.split.splitting if isinstance(self.split, ResponsesOutput) else self.split


class Endpoints:
    """The endpoints of one model. A model with image input needs an image reader."""

    def __init__(
        self,
        *,
        model: ServedModel,
        gateway: WorkerGateway,
        metrics: RouterMetrics,
        ids: IdSource,
        config: RouterSection,
        images: RequestImageReader | None = None,
    ) -> None:
        self.model = model.name
        self.gateway = gateway
        self.metrics = metrics
        self.config = config
        self.is_closing = False
        self._defaults = model.defaults
        self._tokenizer = model.tokenizer
        image_support = (
            ImageSupport(images, model.image_prompts, self._choose_weights) if images and model.image_prompts else None
        )
        self._pool = TextPool(model.tokenizer, config.text_threads)
        self._reader = PromptReader(model.tokenizer, self._pool, image_support, config.tools_in_prompt)
        self._texts = TokenTexts(model.tokenizer)
        self._grammars = GrammarGate(model.tokenizer, paused_s=lambda: gateway.paused_s)
        tokenizer = model.tokenizer
        self._tool_format = tool_format(config.tool_format, tokenizer.tool_template)
        has_unknown_calls = "tools" in tokenizer.tool_template_variables and not has_known_calls(tokenizer.tool_template)
        if config.tool_format == AUTO and has_unknown_calls:
            logger.warning(event("tool_format_unknown", reason=_UNKNOWN_CALLS))
        if tokenizer.unknown_template_tokens:
            logger.warning(
                event("template_token_unknown", names=",".join(tokenizer.unknown_template_tokens), reason=_UNKNOWN_TOKENS)
            )
        self._has_reasoning = has_thinking_tags(tokenizer.template) or has_thinking_tags(tokenizer.tool_template)
        self._ids = ids
        self._max_prompt_tokens = config.max_prompt_tokens
        self._time = TimeLimits(gateway, config.request_timeout_s)
        self._renderer = EngineRenderer(gateway.engine_api, ids)
        self.created = int(time.time())
        metrics.watch("ready", "1 if a request can be served now.", lambda: self.not_ready_reason is None)

    # ---- generation --------------------------------------------------------------------------------------------------

    async def complete(self, request: CompletionRequest, caller: Caller) -> ASGIApp:
        """Serve ``POST /v1/completions``. Raises the error that refuses or ends the request."""
        return await self._generate(await self._time.run(self._read(request, caller), request.timeout_s, caller), caller)

    async def chat(self, request: ChatCompletionRequest, caller: Caller, answers: ResponsesRequest | None = None) -> ASGIApp:
        """Serve ``POST /v1/chat/completions``. Raises the error that refuses or ends the request.

        ``answers`` is the request that it is the meaning of, if it came by another endpoint.
        """
        reading = self._read_chat(request, caller, answers)
        return await self._generate(await self._time.run(reading, request.timeout_s, caller), caller)

    async def respond(self, request: ResponsesRequest, caller: Caller) -> ASGIApp:
        """Serve ``POST /v1/responses``, as a chat. Raises the error that refuses or ends the request."""
        check_responses_supported(request)
        try:
            chat = chat_request(request)
            body = msgspec.json.encode(chat)
            if await self.engine_body(CHAT, body, caller) is not None:
                is_plain = engine_body(CHAT, body, self.model, splits_output=False) is None
                raise InvalidRequest(_SPLIT_IN_CHATS if is_plain else _ONLY_IN_CHATS)
            return await self.chat(chat, caller, request)
        except (InvalidRequest, EncoderInputMissing) as error:
            raise in_words_of_responses(error) from None
        except RequestFailure as failure:
            raise RequestFailure(failure_in_words_of_responses(failure.info)) from None

    async def _read(self, request: CompletionRequest, caller: Caller) -> Prepared:
        options, limits = await self._check(request)
        prompts = await self._reader.read_completion(request, limits, caller.hold)
        return await self._prepared(request, options, prompts, limits, caller)

    async def _read_chat(self, request: ChatCompletionRequest, caller: Caller, answers: ResponsesRequest | None) -> Prepared:
        options, limits = await self._check(request)
        tools = tool_use(request)
        form = given_form(request)
        prompt = await self._reader.read_chat(request, limits, caller.hold)
        splitting = ChatOutput(
            tools=tools,
            format=self._tool_format,
            has_reasoning=self._has_reasoning and form is None and (tools is None or tools.form is None),
            is_reasoning_open=opens_reasoning(prompt.text, continued_text(request)),
            shows_reasoning=request.include_reasoning is not False,
            form=form,
        )
        if splitting.needs_special_tokens:
            options = replace(options, skip_special_tokens=False)
        split = splitting if answers is None else ResponsesOutput(answers, splitting)
        return await self._prepared(request, options, [prompt], limits, caller, split)

    async def engine_body(self, path: str, body: bytes, caller: Caller) -> EngineBody | None:
        """Return a body as one for the workers' engines, None if this router serves or refuses it. Waits after a pause.

        Raises:
            InvalidRequest: it has too many values, or fields that engines would ignore.
            NoWorker: an engine may serve it, but no worker is known. Others as ``TimeLimits.run``.
        """
        core, api = self.gateway.core, self.gateway.engine_api
        if core.is_route_expected(self.gateway.now):
            if (timed := timed_body(body)) is None:
                return None
            await self._time.run(self.gateway.wait_for_route(), timed.timeout_s, caller)
        if core.membership.workers and not api.is_there:
            return None
        check_num_values(body)
        found = engine_body(path, body, self.model, splits_output=api.splits_output)
        if found is not None and not api.is_there:
            self.check_ready()
        return found

    async def serve_by_engine(self, body: EngineBody, caller: Caller) -> ASGIApp:
        """Serve a body that only an engine can render, or read. Raises the error that refuses or ends the request."""
        timeout_s = body.timeout_s
        try:
            if not body.is_whole:
                return await self._generate(await self._time.run(self._render(body, caller), timeout_s, caller), caller)
            async with AsyncExitStack() as stack:
                answer = await self._time.run(self._pass_on(body, caller, stack), timeout_s, caller)
                return PassedOn(body.path, answer, stack.pop_all(), self.metrics)
        except EngineRefusal as refusal:
            raise RequestFailure(refusal.info) from None

    async def count_by_engine(self, body: EngineBody, caller: Caller) -> dict[str, Any]:
        """Return what an engine answers to a body that asks for a number of tokens. Raises as ``serve_by_engine``."""
        timeout_s = body.timeout_s
        try:
            return await self._time.run(self._count(body, caller), timeout_s, caller)
        except EngineRefusal as refusal:
            raise RequestFailure(refusal.info) from None

    async def _count(self, body: EngineBody, caller: Caller) -> dict[str, Any]:
        self.gateway.core.check_room_for_call()
        return await self._renderer.count_tokens(body, partial(self._time.deadline, body.timeout_s, caller))

    async def _render(self, body: EngineBody, caller: Caller) -> Prepared:
        request = body.of_router()
        options, limits = await self._check(request)
        check_num_choices(body.num_prompts, request.n or 1)
        self.gateway.core.check_room_for_call()
        rendered = await self._renderer.render(body, partial(self._time.deadline, body.timeout_s, caller))
        prompts = [
            Prompt(found.token_ids, "", model_fingerprint=rendered.model_fingerprint, engine_request=found.engine_request)
            for found in rendered.prompts
        ]
        check_rendered(prompts, request.n or 1, caller.hold)
        if options.echo:
            prompts = [replace(prompt, text=await self._pool.decode(prompt.token_ids)) for prompt in prompts]
        return await self._prepared(request, options, prompts, limits, caller, body if body.is_split else None)

    async def _pass_on(self, body: EngineBody, caller: Caller, stack: AsyncExitStack) -> EngineAnswer:
        await self.gateway.wait_for_route()
        self.check_ready()
        self.gateway.core.check_room_for_call()
        legs = TwoLegs(
            self.gateway.engine_api,
            self.gateway.core,
            self._ids,
            partial(self._time.deadline, body.timeout_s, caller),
            caller.trace,
        )
        return await legs.open(body, stack)

    async def _check(self, request: CompletionRequest | ChatCompletionRequest) -> tuple[OutputOptions, ModelLimits]:
        self.check_model(request.model)
        check_supported(request)
        check_ranges(request)
        options = output_options(request)
        await self.gateway.wait_for_route()
        return options, self.limits()

    async def _prepared(
        self,
        request: CompletionRequest | ChatCompletionRequest,
        options: OutputOptions,
        prompts: list[Prompt],
        limits: ModelLimits,
        caller: Caller,
        split: EngineBody | ChatOutput | ResponsesOutput | None = None,
    ) -> Prepared:
        """Return the request with the parameters of all its prompts, whose form workers can compile, when there is a route."""
        shared = shared_params(request, limits, len(prompts))
        check_num_logprobs(request, shared, [len(prompt.token_ids) for prompt in prompts])
        found = Prepared(request, options, prompts, limits, shared, split)
        tools = found.splitting.tools if isinstance(found.splitting, ChatOutput) else None
        form, field = shared.structured_output, field_of_form(request)
        if tools is not None and tools.form is not None:
            form, field = tools.form, "tools"
        form = await self._grammars.check_with_calls(form, field, tools, self._tool_format.syntaxes, caller.tenant)
        await self.gateway.wait_for_route()
        return replace(found, shared=msgspec.structs.replace(shared, structured_output=form), form_field=field or "")

    async def _generate(self, found: Prepared, caller: Caller) -> ASGIApp:
        request, options, split, splitting = found.request, found.options, found.split, found.splitting
        submissions = [self._submission(found, prompt, caller) for prompt in found.prompts]
        output = RequestOutput(self._tokenizer, options, found.prompts, submissions[0].n)
        kind = "resp_" if isinstance(split, ResponsesOutput) else _ID_PREFIXES[type(request)]
        envelope = Envelope(id=f"{kind}{submissions[0].request_id}", created=int(time.time()), model=self.model)
        if isinstance(splitting, ChatOutput):
            splitting.answer_id = envelope["id"]
        shaper: CompletionShaper | ChatShaper | ResponsesShaper
        if isinstance(split, ResponsesOutput):
            shaper = ResponsesShaper(envelope, options, output, self._texts, split, found.shared)
        elif isinstance(request, CompletionRequest):
            shaper = CompletionShaper(envelope, options, output, self._texts)
        else:
            chat_output = splitting if isinstance(splitting, ChatOutput) else None
            shaper = ChatShaper(envelope, options, output, self._texts, chat_output)
        # Last, because a failure after this would have to abort workers.
        wait = partial(self._time.wait_for_change, request.timeout_s, caller)
        generation = await self.gateway.open(caller.client_id, submissions, wait, caller.trace)
        if isinstance(shaper, ResponsesShaper):
            answer: HttpAnswer = ResponsesAnswer(generation, output, shaper, caller, self._pool)
        elif isinstance(split, EngineBody) and isinstance(shaper, ChatShaper):
            splitter = self._splitter(split, found.prompts[0], caller)
            answer = SplitAnswer(generation, output, shaper, caller, self._pool, splitter)
        else:
            answer = HttpAnswer(generation, output, shaper, caller, self._pool)
        try:
            if options.is_stream:
                return EventStream(answer, await answer.first(), self.metrics)
            response = await answer.whole()
        except BaseException:
            answer.close()
            raise
        answer.close()
        return response

    def _splitter(self, body: EngineBody, prompt: Prompt, caller: Caller) -> OutputSplitter:
        return OutputSplitter(
            self._renderer,
            body,
            prompt.token_ids,
            prompt.model_fingerprint,
            partial(self._time.deadline, body.timeout_s, caller),
            self._pool,
        )

    def _submission(self, found: Prepared, prompt: Prompt, caller: Caller) -> Submission:
        request = found.request
        return Submission(
            request_id=new_hex_id(self._ids),
            prompt_token_ids=prompt.token_ids,
            sampling=params_of_prompt(request, found.shared, len(prompt.token_ids), new_seed(self._ids), found.limits),
            n=request.n or 1,
            priority=request.priority or 0,
            tenant=caller.tenant,
            affinity=request.session_id or request.user or getattr(request, "prompt_cache_key", None) or "",
            cache_salt=request.cache_salt or "",
            kv_load_failure_policy=load_failure_policy(request),
            mm_features=prompt.mm_features,
            media=prompt.media,
            media_places=prompt.media_places,
            form_field=found.form_field,
            model_fingerprint=prompt.model_fingerprint,
            engine_request=prompt.engine_request,
            timeout_s=request.timeout_s,
            spent_s=self._time.spent_s(request.timeout_s, caller),
        )

    async def _choose_weights(self) -> bytes:
        await self.gateway.wait_for_route()
        try:
            return choose_weights(self.gateway.core.membership.workers)
        except NoWorker as error:
            error.retry_after_s = self.gateway.retry_after_s
            raise

    # ---- the rest ----------------------------------------------------------------------------------------------------

    def check_model(self, name: str | None) -> None:
        """Refuse a name other than the served model's; a missing name means the served model.

        Raises:
            ModelNotFound: names both models.
        """
        if name and name != self.model:
            raise ModelNotFound(f"The model `{name}` does not exist; this cluster serves `{self.model}`.", param="model")

    def limits(self) -> ModelLimits:
        """Return the current limits of a request.

        Raises:
            NoWorker: there is no route, so no request can be served.
        """
        self.check_ready()
        return ModelLimits(
            max_model_len=self.gateway.core.max_model_len,
            later_model_len=self._longest_model_len,
            max_prompt_tokens=self._max_prompt_tokens,
            vocab_size=self._tokenizer.vocab_size,
            defaults=self._defaults,
            eos_token_ids=frozenset(self._tokenizer.eos_token_ids),
        )

    @property
    def _longest_model_len(self) -> int:
        """The longest context that is served now, or may soon be, in tokens."""
        return self.gateway.core.longest_model_len(self.gateway.now)

    def check_ready(self) -> None:
        """Check that a request can be served now.

        Raises:
            NoWorker: there is no route.
        """
        reason = self.not_ready_reason
        if reason is not None:
            raise NoWorker(reason, retry_after_s=0 if self.is_closing else self.gateway.retry_after_s)

    @property
    def not_ready_reason(self) -> str | None:
        """Why no request can be served now; None if requests can be served."""
        return "the router is shutting down" if self.is_closing else self.gateway.core.not_ready_reason

    async def tokenize(self, request: TokenizeRequest, caller: Caller) -> Tokenized:
        """Serve ``POST /tokenize``. Raises the error that refuses or ends the request."""
        return await self._time.run(self._tokenize(request), None, caller)

    async def _tokenize(self, request: TokenizeRequest) -> Tokenized:
        """Return the tokens of a text. Raises InvalidRequest unless there is either a prompt or messages."""
        self.check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        check_messages(request.messages or ())
        max_model_len = self._longest_model_len
        if request.prompt is not None:
            text, add_special = request.prompt, request.add_special_tokens is not False
        else:
            images = find_images(request.messages or ())
            if images:  # their number of tokens depends on their sizes, for which they would have to be fetched
                raise InvalidRequest(f"{images[0].place}: /tokenize takes no images: leave it out", param=images[0].place)
            text, add_special = await self._reader.render_in_time(request.as_chat()), bool(request.add_special_tokens)
        field = "messages" if request.prompt is None else "prompt"
        found = await self._reader.tokenize(text, add_special_tokens=add_special, max_model_len=max_model_len, param=field)
        tokens = list(found)
        strings = await self._pool.run(lambda: self._spelled(tokens)) if request.return_token_strs else None
        return Tokenized(count=len(tokens), max_model_len=max_model_len, tokens=tokens, token_strs=strings)

    async def detokenize(self, request: DetokenizeRequest, caller: Caller) -> Detokenized:
        """Serve ``POST /detokenize``. Raises InvalidRequest for ids outside the vocabulary, or too many."""
        self.check_model(request.model)
        most = max_text_tokens(self._longest_model_len)
        if len(request.tokens) > most:
            raise InvalidRequest(f"there are {len(request.tokens)} tokens, at most {most} are taken here", param="tokens")
        check_token_ids("tokens", request.tokens, self._tokenizer.vocab_size)
        decoding = self._pool.decode(request.tokens, skip_special_tokens=False)
        return Detokenized(prompt=await self._time.run(decoding, None, caller))

    def _spelled(self, token_ids: list[int]) -> list[str]:
        return [self._tokenizer.token(token_id) or "" for token_id in token_ids]

    def close(self) -> None:
        """Cancel work that waits for a thread, and end the process that checks grammars."""
        self._pool.close()
        self._grammars.close()

    def models(self) -> list[dict[str, Any]]:
        """Return the model card in a list."""
        return [
            {
                "id": self.model,
                "object": "model",
                "created": self.created,
                "owned_by": "kvferry",
                "root": self.model,
                "parent": None,
                "max_model_len": self._longest_model_len or None,  # unknown without a worker
                "permission": [],
            }
        ]
