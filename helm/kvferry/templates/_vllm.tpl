{{/*
Engine vllm: in the pod of a worker, `vllm serve` and, as its main container, the agent. vLLM is a native sidecar: it is up before
the agent registers and gone after the agent has left, which waits until no reader needs a block. Without the agent (llm-d routes)
vLLM is the main container itself, behind llm-d's proxy on decode pods.
*/}}

{{/* True if a role's pods run vLLM. */}}
{{- define "kvferry.isVllm" -}}
{{- if and (eq .root.Values.engine "vllm") (has .role (list "prefill" "decode" "aggregated")) -}}true{{- end -}}
{{- end -}}

{{/* True if our agent stands beside it. */}}
{{- define "kvferry.hasAgent" -}}
{{- if and (include "kvferry.isVllm" .) .root.Values.vllm.agent.enabled -}}true{{- end -}}
{{- end -}}

{{/* True if it hands KV over, and so has the plug-in. */}}
{{- define "kvferry.hasPlugin" -}}
{{- if and (include "kvferry.isVllm" .) (has .role (list "prefill" "decode")) -}}true{{- end -}}
{{- end -}}

{{/* True if llm-d's proxy stands before it. */}}
{{- define "kvferry.hasProxy" -}}
{{- if and (include "kvferry.isVllm" .) (not .root.Values.vllm.agent.enabled) (eq .role "decode") -}}true{{- end -}}
{{- end -}}

{{/* How many nodes one engine of a role takes. */}}
{{- define "kvferry.nodes" -}}
{{- if include "kvferry.isVllm" . -}}{{- dig "vllm" "nodes" 1 (index .root.Values .role) -}}{{- else -}}1{{- end -}}
{{- end -}}

{{/* The port of vLLM's API: on loopback behind the agent, on the pod's address behind llm-d. */}}
{{- define "kvferry.vllmPort" -}}
{{- $vllm := .root.Values.vllm -}}
{{- if or $vllm.agent.enabled (include "kvferry.hasProxy" .) -}}{{- $vllm.port -}}{{- else -}}{{- .root.Values.ports.http -}}{{- end -}}
{{- end -}}

{{- define "kvferry.vllmTransfer" -}}
{{- $connector := (include "kvferry.config" . | fromYaml).connector -}}
{{- $extra := dict "kvferry.host" "$(POD_IP)" "kvferry.port" (int .root.Values.ports.control) -}}
{{- $names := list "transports" "kv_verify" "transfer_deadline_s" "transfer_stall_s" "transport_retry_s" "transport_retry_max_s" "handshake_timeout_s" "lease_s" "lease_renew_interval_s" "lease_max_s" "max_quarantined_blocks" -}}
{{- range $name := $names -}}
{{- if hasKey $connector $name -}}{{- $_ := set $extra (printf "kvferry.%s" $name) (get $connector $name) -}}{{- end -}}
{{- end -}}
{{- if .root.Values.security.insecure -}}{{- $_ := set $extra "kvferry.insecure" true -}}{{- end -}}
{{- range $name, $value := .root.Values.vllm.settings -}}{{- $_ := set $extra (printf "kvferry.%s" $name) $value -}}{{- end -}}
{{- dict
      "kv_connector" "KvferryConnector"
      "kv_role" "kv_both"
      "kv_load_failure_policy" (default "recompute" $connector.kv_load_failure_policy)
      "kv_connector_extra_config" $extra | toJson -}}
{{- end -}}

{{/*
"true" if vLLM tells the agent what its prefix cache holds: unless the router places by load, the engine has several data-parallel
ranks with an endpoint each, or the values have endpoints of their own.
*/}}
{{- define "kvferry.hasKvEvents" -}}
{{- if include "kvferry.hasAgent" . -}}
{{- $config := include "kvferry.config" .  | fromYaml -}}
{{- $own := default dict (index .root.Values .role).vllm -}}
{{- $arguments := join " " (concat (default list .root.Values.vllm.arguments) (default list $own.arguments)) | replace "_" "-" -}}
{{- $isUsed := eq (dig "router" "routing" "predicted" $config) "predicted" -}}
{{- if and $isUsed (not (hasKey $own "dataParallelSize")) (not (contains "--kv-events-config" $arguments)) (not (dig "agent" "kv_events_address" "" $config)) -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* A name in the pod's network namespace, or the node's: only processes there reach it, and vLLM binds it. */}}
{{- define "kvferry.eventsAddress" -}}ipc://@kv-events-$(POD_NAME){{- end -}}

{{- define "kvferry.vllmEvents" -}}
{{- $address := include "kvferry.eventsAddress" . -}}
{{- dict "enable_kv_cache_events" true "publisher" "zmq" "endpoint" $address "replay_endpoint" (printf "%s-replay" $address) | toJson -}}
{{- end -}}

{{/* The command line, of the node of this number for an engine of several: (dict "root" $ "role" "prefill" "headless" false). */}}
{{- define "kvferry.vllmCommand" -}}
{{- $config := include "kvferry.config" . | fromYaml -}}
{{- $own := default dict (index .root.Values .role).vllm -}}
{{- $nodes := include "kvferry.nodes" . | int -}}
{{- $command := list "vllm" "serve" $config.model.name "--served-model-name" (default $config.model.name $config.model.served_name) -}}
{{- $any := ternary "::" "0.0.0.0" (eq .root.Values.network.ipFamily "IPv6") -}}
{{- $host := ternary "127.0.0.1" $any (or .root.Values.vllm.agent.enabled (eq (include "kvferry.hasProxy" .) "true")) -}}
{{- $command = concat $command (list "--host" $host "--port" (include "kvferry.vllmPort" .)) -}}
{{- $command = concat $command (list "--tensor-parallel-size" (dig "tensorParallelSize" 1 $own | toString)) -}}
{{- with $own.dataParallelSize -}}{{- $command = concat $command (list "--data-parallel-size" (toString .)) -}}{{- end -}}
{{- if .root.Values.vllm.agent.enabled -}}
{{- $command = concat $command (list "--enable-scale-out" "--enable-prompt-tokens-details" "--disable-uvicorn-access-log") -}}
{{- end -}}
{{- with $config.model.max_model_len -}}{{- $command = concat $command (list "--max-model-len" (int64 . | toString)) -}}{{- end -}}
{{- if ne (default "auto" $config.model.dtype) "auto" -}}{{- $command = concat $command (list "--dtype" $config.model.dtype) -}}{{- end -}}
{{- if include "kvferry.hasPlugin" . -}}
{{- $command = concat $command (list "--kv-transfer-config" (include "kvferry.vllmTransfer" .)) -}}
{{- end -}}
{{- if and (include "kvferry.hasKvEvents" .) (not .headless) -}}
{{- $command = concat $command (list "--kv-events-config" (include "kvferry.vllmEvents" .)) -}}
{{- end -}}
{{- if gt $nodes 1 -}}
{{- $command = concat $command (list "--nnodes" (toString $nodes) "--node-rank" "$(LWS_WORKER_INDEX)" "--master-addr" "$(LWS_LEADER_ADDRESS)") -}}
{{- if .headless -}}{{- $command = append $command "--headless" -}}{{- end -}}
{{- end -}}
{{- concat $command (default list .root.Values.vllm.arguments) (default list $own.arguments) | toYaml -}}
{{- end -}}

{{- define "kvferry.vllmEnv" -}}
{{- include "kvferry.env" . }}
- {name: USER, value: vllm}   # of a user id that the image does not know
- {name: VLLM_CACHE_ROOT, value: /tmp/vllm}
- {name: TORCHINDUCTOR_CACHE_DIR, value: /tmp/torchinductor}
- {name: TRITON_CACHE_DIR, value: /tmp/triton}
- {name: HOME, value: /tmp}
- {name: VLLM_NO_USAGE_STATS, value: "1"}
{{- if include "kvferry.hasPlugin" . }}
- {name: PYTHONPATH, value: /opt/kvferry-vllm}
{{- end }}
{{- end -}}

{{/* The fields of the container that sidecar and main container have in common. */}}
{{- define "kvferry.vllmFields" -}}
{{- $values := index .root.Values .role -}}
image: {{ include "kvferry.image" (dict "image" .root.Values.vllm.image "default" "") }}
imagePullPolicy: {{ .root.Values.vllm.image.pullPolicy }}
command:
  {{- include "kvferry.vllmCommand" . | nindent 2 }}
env:
  {{- include "kvferry.vllmEnv" . | nindent 2 }}
{{- with $values.envFrom }}
envFrom: {{ toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- include "kvferry.containerSecurity" . | nindent 2 }}
resources:
  {{- include "kvferry.resources" (dict "root" .root "values" $values "isRdma" (and .root.Values.rdma.enabled (eq (include "kvferry.hasPlugin" .) "true"))) | nindent 2 }}
volumeMounts:
  {{- include "kvferry.mounts" . | nindent 2 }}
{{- if include "kvferry.hasPlugin" . }}
  - {name: plugin, mountPath: /opt/kvferry-vllm, readOnly: true}
{{- end }}
{{- end -}}

{{- define "kvferry.vllmInitContainers" -}}
{{- $root := .root -}}
{{- if include "kvferry.hasPlugin" . }}
- name: plugin   # the connector, and nothing else, for vLLM's own Python
  image: {{ include "kvferry.image" (dict "image" $root.Values.vllm.plugin "default" $root.Chart.AppVersion) }}
  imagePullPolicy: {{ $root.Values.vllm.plugin.pullPolicy }}
  command: [cp, -r, /plugin/., /opt/kvferry-vllm]
  securityContext:
    {{- include "kvferry.containerSecurity" . | nindent 4 }}
  resources:
    requests: {cpu: 100m, memory: 64Mi}
    limits: {memory: 64Mi}
  volumeMounts:
    - {name: plugin, mountPath: /opt/kvferry-vllm}
{{- end }}
{{- if and (include "kvferry.hasAgent" .) (not .headless) }}
- name: vllm
  restartPolicy: Always
  {{- include "kvferry.vllmFields" . | nindent 2 }}
  {{- include "kvferry.vllmProbes" . | nindent 2 }}
{{- end }}
{{- if include "kvferry.hasProxy" . }}
- name: proxy   # llm-d's: it has a prefill pod compute the prompt, and passes the place of its KV on
  restartPolicy: Always
  image: {{ include "kvferry.image" (dict "image" $root.Values.vllm.proxy.image "default" "") }}
  imagePullPolicy: {{ $root.Values.vllm.proxy.image.pullPolicy }}
  args: [--port={{ $root.Values.ports.http }}, --vllm-port={{ $root.Values.vllm.port }}, --connector=nixlv2, --secure-proxy=false]
  ports:
    - {name: http, containerPort: {{ $root.Values.ports.http }}}
  securityContext:
    {{- include "kvferry.containerSecurity" . | nindent 4 }}
  resources:
    requests: {cpu: 200m, memory: 128Mi}
    limits: {memory: 256Mi}
{{- end }}
{{- end -}}

{{/*
vLLM as the main container. Its pod leaves once gateways know of it, its requests have ended and no reader needs a block, for
some seconds in a row: a request whose prompt is computed elsewhere is at the proxy, and the engine does not count it yet.
*/}}
{{- define "kvferry.vllmMain" -}}
{{- $port := include "kvferry.vllmPort" . -}}
name: {{ .role }}
{{ include "kvferry.vllmFields" . }}
{{- if not .headless }}
ports:
  - {name: {{ ternary "vllm" "http" (eq (include "kvferry.hasProxy" .) "true") }}, containerPort: {{ $port }}}
  - {name: control, containerPort: {{ .root.Values.ports.control }}}
{{- include "kvferry.vllmProbes" . | nindent 0 }}
lifecycle:
  preStop:
    exec:
      command:
        - python3
        - -c
        - |
          import re, time, urllib.request
          end = time.monotonic() + {{ include "kvferry.drainSeconds" . }}
          time.sleep({{ .root.Values.vllm.endpointDelaySeconds }})
          busy_at = time.monotonic()
          while time.monotonic() < min(end, busy_at + {{ .root.Values.vllm.idleSeconds }}):
              try:
                  text = urllib.request.urlopen("http://127.0.0.1:{{ $port }}/metrics", timeout=5).read().decode()
                  held = re.findall(r"^vllm:(?:kvferry_held_blocks|num_requests_running|num_requests_waiting)\{.*\} (\S+)$", text, re.M)
                  is_busy = any(map(float, held))
              except TimeoutError:
                  is_busy = True
              if is_busy:
                  busy_at = time.monotonic()
              time.sleep(1)
{{- end }}
{{- end -}}

{{/* How the kubelet looks at a server that listens on loopback; it ends the look after the probe's timeoutSeconds. */}}
{{- define "kvferry.vllmHealth" -}}
exec: {command: [python3, -c, "import urllib.request; urllib.request.urlopen('http://127.0.0.1:{{ include "kvferry.vllmPort" . }}/health')"]}
{{- end -}}

{{/*
Liveness is of a server that hangs, which has nothing to drain; one that dies ends its container. An agent says itself whether
requests may come.
*/}}
{{- define "kvferry.vllmProbes" -}}
{{- $given := default dict (index .root.Values .role).probes -}}
{{- $hasAgent := eq (include "kvferry.hasAgent" .) "true" -}}
{{- $isOnLoopback := or $hasAgent (eq (include "kvferry.hasProxy" .) "true") -}}
{{- $defaults := dict
      "startup" (dict "periodSeconds" 5 "timeoutSeconds" 5 "failureThreshold" (include "kvferry.startTries" . | int) "terminationGracePeriodSeconds" 15)
      "readiness" (dict "periodSeconds" 2 "timeoutSeconds" 2 "failureThreshold" 2)
      "liveness" (dict "periodSeconds" 10 "timeoutSeconds" 5 "failureThreshold" 6 "terminationGracePeriodSeconds" 15) -}}
{{- range $name := ternary (list "startup" "liveness") (list "startup" "readiness" "liveness") $hasAgent }}
{{ $name }}Probe:
  {{- if $isOnLoopback }}
  {{- include "kvferry.vllmHealth" $ | nindent 2 }}
  {{- else }}
  httpGet: {path: /health, port: http}
  {{- end }}
  {{- merge (deepCopy (default dict (get $given $name))) (get $defaults $name) | toYaml | nindent 2 }}
{{- end }}
{{- end -}}

{{/* An engine of several nodes: its first pod has the agent and the API, the others compute. */}}
{{- define "kvferry.leaderWorkerSet" -}}
{{- $values := index .root.Values .role -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata:
  name: {{ include "kvferry.roleName" . }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "kvferry.labels" . | nindent 4 }}
spec:
  replicas: {{ $values.replicas }}
  {{- with $values.rollingUpdate }}
  rolloutStrategy:
    type: RollingUpdate
    rollingUpdateConfiguration:
      maxUnavailable: {{ dig "maxUnavailable" 0 . }}
      maxSurge: {{ dig "maxSurge" 1 . }}
  {{- end }}
  leaderWorkerTemplate:
    size: {{ include "kvferry.nodes" . }}
    restartPolicy: RecreateGroupOnPodRestart   # the engine ends with any of its nodes
    leaderTemplate:
      {{- include "kvferry.podTemplate" . | nindent 6 }}
    workerTemplate:
      {{- include "kvferry.podTemplate" (merge (dict "headless" true) .) | nindent 6 }}
{{- end -}}
