{{/* Names, labels and small calculations. Every helper with a role takes (dict "root" $ "role" "prefill"). */}}

{{- define "kvferry.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := default (ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name)) .Values.fullnameOverride -}}
{{- if gt (len $full) 40 -}}
{{- $full = printf "%s-%s" ($full | trunc 33 | trimSuffix "-") (sha256sum $full | trunc 6) -}}
{{- end -}}
{{- trimSuffix "-" $full -}}
{{- end -}}

{{- define "kvferry.roleName" -}}
{{- printf "%s-%s" (include "kvferry.fullname" .root) .role -}}
{{- end -}}

{{- define "kvferry.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .role }}
{{- end -}}

{{- define "kvferry.labels" -}}
{{ include "kvferry.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{/* A NetworkPolicy or affinity selector for the pods of several roles: (dict "root" $ "roles" (list ...)). */}}
{{- define "kvferry.selectorOf" -}}
matchLabels:
  app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | quote }}
  app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
matchExpressions:
  - key: app.kubernetes.io/component
    operator: In
    values: {{ toJson .roles }}
{{- end -}}

{{/* Names of the roles that are on and have pods of their own, as JSON; `kvferry.workers` are those that compute, `kvferry.kvWorkers` those with a KV pool. */}}
{{- define "kvferry.roles" -}}
{{- $on := list -}}
{{- range $role := list "router" "encode" "prefill" "decode" "aggregated" "kvstore" -}}
{{- if and (index $.Values $role).enabled (not (and (eq $role "kvstore") (eq $.Values.kvstore.mode "sidecar"))) -}}{{- $on = append $on $role -}}{{- end -}}
{{- end -}}
{{- toJson $on -}}
{{- end -}}

{{- define "kvferry.workers" -}}
{{- $on := list -}}
{{- range $role := include "kvferry.roles" . | fromJsonArray -}}
{{- if has $role (list "encode" "prefill" "decode" "aggregated") -}}{{- $on = append $on $role -}}{{- end -}}
{{- end -}}
{{- toJson $on -}}
{{- end -}}

{{- define "kvferry.kvWorkers" -}}
{{- without (include "kvferry.workers" . | fromJsonArray) "encode" | toJson -}}
{{- end -}}

{{/* True if the pods of a role have a store in them. */}}
{{- define "kvferry.hasStore" -}}
{{- if and .root.Values.kvstore.enabled (eq .root.Values.kvstore.mode "sidecar") (has .role (include "kvferry.kvWorkers" .root | fromJsonArray)) -}}true{{- end -}}
{{- end -}}

{{/* An image reference of (dict "image" .Values.image "default" .Chart.AppVersion). */}}
{{- define "kvferry.image" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (default .default .image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "kvferry.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "kvferry.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Bytes of a Kubernetes quantity such as 4Gi, 500M or 1024, without the fraction of one. */}}
{{- define "kvferry.bytes" -}}
{{- include "kvferry.exactBytes" . | float64 | floor | int64 -}}
{{- end -}}

{{/* The same with the fraction. */}}
{{- define "kvferry.exactBytes" -}}
{{- $text := toString . -}}
{{- $units := dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 -}}
{{- $number := regexFind "^[0-9]+([.][0-9]+)?" $text -}}
{{- $unit := trimPrefix $number $text -}}
{{- if and $unit (not (hasKey $units $unit)) -}}
{{- fail (printf "%q is not a memory quantity: use Ki, Mi, Gi or Ti" $text) -}}
{{- end -}}
{{- mulf (float64 $number) (float64 (default 1 (get $units $unit))) | toJson -}}
{{- end -}}

{{- define "kvferry.clusterKeySecret" -}}
{{- default (printf "%s-cluster-key" (include "kvferry.fullname" .)) .Values.security.clusterKey.existingSecret -}}
{{- end -}}

{{/* The cluster key that the chart's own Secret holds, in base64: given, or found in the cluster, or made; one per rendering. */}}
{{- define "kvferry.ownClusterKey" -}}
{{- $key := .Values.security.clusterKey -}}
{{- if not (hasKey .Values "madeClusterKey") -}}
{{- $kept := dig "data" $key.key "" (lookup "v1" "Secret" .Release.Namespace (include "kvferry.clusterKeySecret" .) | default dict) -}}
{{- $_ := set .Values "madeClusterKey" (default (default (randBytes 32 | b64enc) $kept) ($key.value | b64enc)) -}}
{{- end -}}
{{- .Values.madeClusterKey -}}
{{- end -}}

{{/* A checksum of what the secrets of a role's pods hold, so that a change replaces the pods. Without a cluster only names are
known: change security.revision by hand there. */}}
{{- define "kvferry.secretChecksum" -}}
{{- $security := .root.Values.security -}}
{{- $names := list -}}
{{- $held := list (toString $security.revision) -}}
{{- if not $security.insecure -}}
{{- if $security.clusterKey.existingSecret -}}
{{- $names = append $names $security.clusterKey.existingSecret -}}
{{- else -}}
{{- $held = append $held (printf "%s %s" (include "kvferry.ownClusterKey" .root) (join "," $security.clusterKey.others)) -}}
{{- end -}}
{{- end -}}
{{- if and (eq .role "router") $security.apiKeys.existingSecret -}}
{{- $names = append $names $security.apiKeys.existingSecret -}}
{{- end -}}
{{- if and (eq .role "router") $security.tls.existingSecret -}}
{{- $names = append $names $security.tls.existingSecret -}}
{{- end -}}
{{- if and (or (eq .role "kvstore") (include "kvferry.hasStore" .)) .root.Values.kvstore.redis.existingSecret -}}
{{- $names = append $names .root.Values.kvstore.redis.existingSecret -}}
{{- end -}}
{{- range $names -}}
{{- $held = append $held (printf "%s %s" . (lookup "v1" "Secret" $.root.Release.Namespace . | default dict | dig "data" dict | toJson)) -}}
{{- end -}}
{{- join "\n" $held | sha256sum -}}
{{- end -}}

{{- define "kvferry.modelClaim" -}}
{{- default (printf "%s-models" (include "kvferry.fullname" .)) .Values.modelCache.existingClaim -}}
{{- end -}}

{{/* Seconds between the order to leave and the kill: drain, then the leases that its last requests leave, and what the process needs after it. */}}
{{- define "kvferry.drainSeconds" -}}
{{- $config := include "kvferry.config" . | fromYaml -}}
{{- if eq .role "router" -}}
{{- add (dig "router" "drain_timeout_s" 30 $config | ceil | int) .root.Values.router.endpointDelaySeconds -}}
{{- else if eq .role "kvstore" -}}
{{- 10 -}}
{{- else if eq .role "encode" -}}
{{- add (dig "worker" "drain_timeout_s" 30 $config | ceil | int) (dig "ec_connector" "lease_s" 60 $config | ceil | int) -}}
{{- else -}}
{{- $seconds := add (dig "worker" "drain_timeout_s" 30 $config | ceil | int) (dig "connector" "lease_s" 30 $config | ceil | int) -}}
{{- if and (include "kvferry.isVllm" .) (not (include "kvferry.hasAgent" .)) -}}
{{- $seconds = add $seconds .root.Values.vllm.endpointDelaySeconds .root.Values.vllm.idleSeconds -}}
{{- end -}}
{{- $seconds -}}
{{- end -}}
{{- end -}}

{{- define "kvferry.graceSeconds" -}}
{{- $derived := add (include "kvferry.drainSeconds" .) 20 -}}
{{- if include "kvferry.hasStore" . -}}{{- $derived = add $derived 10 -}}{{- end -}}
{{- $given := (index .root.Values .role).terminationGracePeriodSeconds -}}
{{- default $derived $given | int -}}
{{- end -}}

{{/* True if the pods of a role have an init container that fetches the model. vLLM fetches its model itself. */}}
{{- define "kvferry.fetchesModel" -}}
{{- $cache := .root.Values.modelCache -}}
{{- if and (ne .role "kvstore") (not (include "kvferry.isVllm" .)) $cache.fetch (not $cache.readOnly) -}}true{{- end -}}
{{- end -}}

{{/*
"true" if pods of a role may have to fetch a model: by an init container, or at the worker's own start where the volume begins
empty. With fetch off, a claim is taken to hold it.
*/}}
{{- define "kvferry.reachesModelSources" -}}
{{- $cache := .root.Values.modelCache -}}
{{- $model := default "" (include "kvferry.config" . | fromYaml).model.name -}}
{{- $startsEmpty := and (ne $cache.kind "existingClaim") (not (hasPrefix "/" $model)) -}}
{{- if and (ne .role "kvstore") (not $cache.readOnly) (or $cache.fetch $startsEmpty) -}}true{{- end -}}
{{- end -}}

{{/*
How long a Deployment waits for a new pod: a minute to be placed, half an hour to fetch the model, and as long as its startup
probes allow. With an agent there are two in turn, vLLM's and the agent's.
*/}}
{{- define "kvferry.startSeconds" -}}
{{- $probe := dig "probes" "startup" dict (index .root.Values .role) -}}
{{- $tries := dig "failureThreshold" (include "kvferry.startTries" . | int) $probe -}}
{{- $seconds := add (mul (dig "periodSeconds" 5 $probe) $tries) (dig "initialDelaySeconds" 0 $probe) -}}
{{- $fetch := ternary 1800 0 (eq (include "kvferry.fetchesModel" .) "true") -}}
{{- add 60 $fetch (mul $seconds (ternary 2 1 (eq (include "kvferry.hasAgent" .) "true"))) -}}
{{- end -}}

{{/* How often the startup probe asks by default: vLLM compiles, and may load a model of many gigabytes. */}}
{{- define "kvferry.startTries" -}}
{{- ternary 360 180 (eq (include "kvferry.isVllm" .) "true") -}}
{{- end -}}

{{/* The port of an http or https address. */}}
{{- define "kvferry.portOf" -}}
{{- $url := urlParse . -}}
{{- regexFind "[0-9]+$" (regexFind ":[0-9]+$" $url.host) | default (ternary "443" "80" (eq $url.scheme "https")) | atoi -}}
{{- end -}}

{{/* The ports of hosts of images, as JSON: those of http and https, and those that entries NAME:PORT add. */}}
{{- define "kvferry.imagePorts" -}}
{{- $ports := list 80 443 -}}
{{- range $host := . -}}
{{- with regexFind "^[^:]+:[0-9]+$" $host -}}{{- $ports = append $ports (regexFind "[0-9]+$" . | atoi) -}}{{- end -}}
{{- end -}}
{{- uniq $ports | toJson -}}
{{- end -}}

{{/* A regular expression of IPv4 addresses; the router takes other numbers with three dots for names. */}}
{{- define "kvferry.ipv4" -}}
{{- $octet := "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])" -}}
{{- printf "(%s[.]){3}%s" $octet $octet -}}
{{- end -}}

{{/* The addresses and networks among hosts of images, which the router allows at all ports, as JSON of CIDRs. */}}
{{- define "kvferry.imageNetworks" -}}
{{- $found := list -}}
{{- range $entry := . -}}
{{- $host := trim $entry | trimAll "[]" -}}
{{- if regexMatch (printf "^(%s|[0-9a-fA-F.]*:[0-9a-fA-F.]*:[0-9a-fA-F.:]*)(/[0-9]+)?$" (include "kvferry.ipv4" .)) $host -}}
{{- $found = append $found (contains "/" $host | ternary $host (printf "%s/%s" $host (contains ":" $host | ternary "128" "32"))) -}}
{{- end -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{/* The KV connectors that a section "connector" names, as JSON. */}}
{{- define "kvferry.connectorNames" -}}
{{- $name := default "p2p" .name -}}
{{- ternary (default list .connectors) (list $name) (eq $name "multi") | toJson -}}
{{- end -}}

{{/* True if transport nixl is among those of a role. */}}
{{- define "kvferry.usesNixl" -}}
{{- $config := include "kvferry.config" . | fromYaml -}}
{{- if has "nixl" $config.connector.transports -}}true{{- end -}}
{{- end -}}

{{/* "true" if others read this role's blocks or embeddings: it listens for readers. */}}
{{- define "kvferry.servesReaders" -}}
{{- if has .role (list "encode" "prefill") -}}true
{{- else if include "kvferry.exchangesBlocks" . -}}true{{- end -}}
{{- end -}}

{{/* "true" if the role's workers both read KV blocks and serve them, since they can switch, or share their prefix caches. */}}
{{- define "kvferry.exchangesBlocks" -}}
{{- if has .role (include "kvferry.kvWorkers" .root | fromJsonArray) -}}
{{- if or (include "kvferry.canSwitchRole" .) (dig "connector" "peer_prefixes" false (include "kvferry.config" . | fromYaml)) -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* "true" if the role's workers read KV blocks from other pods, or serve them. */}}
{{- define "kvferry.movesBlocks" -}}
{{- if or (has .role (list "prefill" "decode")) (include "kvferry.exchangesBlocks" .) -}}true{{- end -}}
{{- end -}}

{{/* "true" if the role's pods get the RDMA device and UCX's settings for it: prefill and decode always, which must use nixl. */}}
{{- define "kvferry.usesRdma" -}}
{{- $isWanted := or (has .role (list "prefill" "decode")) (include "kvferry.usesNixl" .) -}}
{{- if and .root.Values.rdma.enabled $isWanted (include "kvferry.movesBlocks" .) -}}true{{- end -}}
{{- end -}}

{{/* "true" if the role's workers may take another role while they run. */}}
{{- define "kvferry.canSwitchRole" -}}
{{- if has .role (list "prefill" "decode" "aggregated") -}}
{{- if dig "worker" "can_switch_role" false (include "kvferry.config" . | fromYaml) -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* The roles whose workers both read KV blocks and serve them, as JSON. */}}
{{- define "kvferry.exchangingRoles" -}}
{{- $on := list -}}
{{- range $role := include "kvferry.kvWorkers" . | fromJsonArray -}}
{{- if include "kvferry.exchangesBlocks" (dict "root" $ "role" $role) -}}{{- $on = append $on $role -}}{{- end -}}
{{- end -}}
{{- toJson $on -}}
{{- end -}}

{{/* The ports by which pods read KV blocks from each other, as a list of a NetworkPolicy. Sockets of vLLM's ranks have free ports. */}}
{{- define "kvferry.dataPorts" -}}
{{- $ports := .root.Values.ports -}}
{{- if include "kvferry.isVllm" . -}}
- {protocol: TCP, port: 1024, endPort: 65535}
{{- else -}}
- {protocol: TCP, port: {{ $ports.control }}}
- {protocol: TCP, port: {{ $ports.data }}}
{{- if eq (include "kvferry.usesNixl" .) "true" }}
- {protocol: TCP, port: {{ $ports.ucx.first }}, endPort: {{ $ports.ucx.last }}}
{{- end }}
{{- end -}}
{{- end -}}
